"""Triton's digest of its own files, computed before it is needed.

Triton and Inductor find compiled kernels on disk by it. They compute it once in a process, which takes half a second:
most of it reads a large file, and leaves Python alone.
"""

from __future__ import annotations

import logging
import threading

import torch

logger = logging.getLogger(__name__)

_thread: threading.Thread | None = None


def begin_digest(device: torch.device) -> None:
    """Have a thread compute it, where `device` is a GPU and no earlier call did."""
    global _thread
    if device.type != "cuda" or _thread is not None:
        return
    _thread = threading.Thread(target=_compute, name="mrv2 digest", daemon=True)
    _thread.start()


def wait_for_digest() -> None:
    """Return when that thread is through: the digest is kept, but computed twice for two that ask at once."""
    if _thread is not None:
        _thread.join()


def _compute() -> None:
    from torch.utils._triton import triton_hash_with_backend

    try:
        triton_hash_with_backend()
    except Exception as error:  # compiling will meet it too, and report it
        logger.info("Triton is not ready: %s: %s", type(error).__name__, error)
