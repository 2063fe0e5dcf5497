"""Where an operator with a plain reference for the CPU and a Triton kernel for CUDA runs."""

from __future__ import annotations

import torch


def unsupported_device(device: torch.device) -> str | None:
    """Why neither the reference nor the kernel runs on `device`; None when one does."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"it runs on CUDA devices and on the CPU, not on {device.type!r}"
    try:
        from attention.backends.triton.backend import INTERPRETED
    except ImportError as error:
        return f"its kernels for CUDA devices need Triton, which is not importable here: {error}"
    if INTERPRETED:
        # It would copy every tensor to the host and back, and cannot be recorded.
        return "Triton's interpreter is on (TRITON_INTERPRET=1), which is for the CPU"
    return None
