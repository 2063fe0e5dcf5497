"""A backend whose operator belongs into a piece, and computes by itself, from tensors alone."""

from __future__ import annotations

from typing import Any

import torch

from attention.backends.devices import unsupported_device
from attention.base import AttentionBackend


class InPieceBackend(AttentionBackend):
    """A Triton kernel on CUDA devices, plain PyTorch on the CPU."""

    @classmethod
    def unsupported_reason(cls, spec: Any, device: torch.device) -> str | None:
        """See `AttentionBackend.unsupported_reason`."""
        return unsupported_device(device)

    @staticmethod
    def get_impl_cls() -> None:
        """The operator takes tensors alone."""
        return None
