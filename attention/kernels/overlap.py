"""Programmatic dependent launch: a kernel that starts while the one before still runs.

Such a kernel may first do what does not depend on its predecessor. Then it waits for that to end (`gdc_wait`), and only
after that lets its own successor start (`gdc_launch_dependents`): whatever starts may rely on everything before its
immediate predecessor, as the kernels that Inductor generates do. Every program of it has to wait, those without work
too: a kernel that ends before its predecessor would let its successor go ahead of both.
"""

from __future__ import annotations

import functools

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow_predecessor():
    """Wait for the kernel before to end, and let the one after start. Once in every program, before it loads what an
    earlier kernel wrote."""
    gdc_wait()
    gdc_launch_dependents()


@functools.cache
def overlap_constants(device: torch.device) -> dict[str, bool]:
    """What to launch a kernel with that has the constant OVERLAP: on Hopper and later it overlaps."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}
