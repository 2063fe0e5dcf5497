"""One piece of a compiled model as a script of its own."""
