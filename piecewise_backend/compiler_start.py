"""What Inductor waits for the first time in a process, begun early and beside other work."""

from __future__ import annotations

import torch

from attention.kernels.ahead import import_for_first_launch
from attention.kernels.digest import begin_digest


def prepare_compiler(compiler: str, device: torch.device) -> None:
    """Begin what Inductor and Triton need once in a process; `wait_for_digest` before the first use of either."""
    if compiler == "inductor" and device.type == "cuda":
        begin_digest(device)
        import_for_first_launch()  # costs nothing here: the digest takes longer


def start_compile_workers(compiler: str, device: torch.device) -> None:
    """Have Inductor's processes for compiling kernels start now, in the background: they take seconds to come up, and
    until they are there kernels are compiled one after another."""
    if compiler == "inductor" and device.type == "cuda":
        from torch._inductor import async_compile

        if hasattr(async_compile, "maybe_warm_pool"):
            async_compile.maybe_warm_pool()
