"""What Inductor waits for the first time in a process, begun early and beside other work."""

from __future__ import annotations

import logging
import threading

import torch

from attention.kernels.ahead import import_for_first_launch

logger = logging.getLogger(__name__)

_preparation: threading.Thread | None = None


def prepare_compiler(compiler: str, device: torch.device) -> None:
    """Have a thread find out what Inductor asks of Triton once in a process: a digest of its files, and a module that
    it builds with a C compiler. Both are waits for the disk and another process."""
    global _preparation
    if compiler != "inductor" or device.type != "cuda" or _preparation is not None:
        return
    _preparation = threading.Thread(target=_digest_triton, name="mrv2 compiler", daemon=True)
    _preparation.start()
    import_for_first_launch()  # costs nothing here: the thread takes longer


def _digest_triton() -> None:
    from torch.utils._triton import triton_hash_with_backend

    try:
        triton_hash_with_backend()
    except Exception as error:  # compiling will meet it too, and report it
        logger.info("Triton is not ready: %s: %s", type(error).__name__, error)


def wait_until_prepared() -> None:
    """Return when that thread is through: torch keeps the digest, but computes it twice for two that ask at once."""
    if _preparation is not None:
        _preparation.join()


def start_compile_workers(compiler: str, device: torch.device) -> None:
    """Have Inductor's processes for compiling kernels start now, in the background: they take seconds to come up, and
    until they are there kernels are compiled one after another."""
    if compiler == "inductor" and device.type == "cuda":
        from torch._inductor import async_compile

        if hasattr(async_compile, "maybe_warm_pool"):
            async_compile.maybe_warm_pool()
