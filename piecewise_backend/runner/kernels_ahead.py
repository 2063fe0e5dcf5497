"""Which kernels attention may need once a runner serves batches: to be compiled while it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attention.groups import AttentionGroup
from attention.kernels.ahead import Launch, without_memory
from piecewise_backend.program import Operands
from piecewise_backend.runner.model_state import ModelState


def launches_ahead(groups: Sequence[AttentionGroup], state: ModelState, operands: Operands) -> list[Launch]:
    """Launches, not to be run, of every kernel that some batch may need. None where there is no GPU: nothing is
    compiled there."""
    common = state.any_batch()
    if common.seq_lens.device.type != "cuda":
        return []
    launches: list[Launch] = []
    for group in groups:
        layouts = {_layout(operands[name]): name for name in group.layer_names if name in operands}
        for name in layouts.values() if hasattr(group.impl, "launches_ahead") else ():
            tensors = [without_memory(fake) for fake in operands[name]]
            launches += group.impl.launches_ahead(group.builder, common, *tensors)
    return launches


def _layout(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Equal for traced tensors that kernels are compiled alike for."""
    return tuple((t.dtype, *(str(number) for number in (*t.shape, *t.stride()))) for t in tensors)
