"""Kernels of what pieces are made of, where a library's are slow."""
