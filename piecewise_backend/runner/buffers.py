"""Persistent input buffers: what every captured graph reads, written anew for each step."""

from __future__ import annotations

import numpy as np
import torch


class MirroredBuffer:
    """A host array and its device twin at a fixed address. On the CPU both are the same memory."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device, fill: int = 0) -> None:
        on_device = device.type != "cpu"
        self.cpu = torch.full(shape, fill, dtype=dtype, pin_memory=on_device)
        self.gpu = torch.full(shape, fill, dtype=dtype, device=device) if on_device else self.cpu
        self.np: np.ndarray = self.cpu.numpy()
        self._views: dict[int, torch.Tensor] = {}

    def first(self, count: int) -> torch.Tensor:
        """Device view of the first `count` entries: the same object for the same count."""
        view = self._views.get(count)
        if view is None:
            view = self._views[count] = self.gpu[:count]
        return view

    def copy_to_device(self, count: int) -> torch.Tensor:
        """Send the first `count` entries; returns their device view."""
        view = self.first(count)
        if self.gpu is not self.cpu:
            view.copy_(self.cpu[:count], non_blocking=True)
        return view


class InputBuffers:
    """Inputs of one forward pass, sized to the largest batch.

    input_ids, positions, slot_mapping: [max_num_tokens] int64. token_request: [max_num_tokens] int32.
    query_start_loc: [max_num_reqs + 1] int32; seq_lens, state_slots: [max_num_reqs] int32; block_table:
    [max_num_reqs, max_num_blocks] int32.
    """

    def __init__(self, *, max_num_tokens: int, max_num_reqs: int, max_num_blocks: int, device: torch.device) -> None:
        max_num_tokens = max(2, max_num_tokens)  # a dimension of 1 cannot be traced as a dynamic one
        self.max_num_tokens = max_num_tokens
        self.max_num_reqs = max_num_reqs
        self.input_ids = MirroredBuffer(max_num_tokens, dtype=torch.int64, device=device)
        self.positions = MirroredBuffer(max_num_tokens, dtype=torch.int64, device=device)
        self.slot_mapping = MirroredBuffer(max_num_tokens, dtype=torch.int64, device=device, fill=-1)
        self.token_request = MirroredBuffer(max_num_tokens, dtype=torch.int32, device=device, fill=-1)
        self.query_start_loc = MirroredBuffer(max_num_reqs + 1, dtype=torch.int32, device=device)
        self.seq_lens = MirroredBuffer(max_num_reqs, dtype=torch.int32, device=device)
        self.state_slots = MirroredBuffer(max_num_reqs, dtype=torch.int32, device=device, fill=-1)
        self.block_table = MirroredBuffer(max_num_reqs, max_num_blocks, dtype=torch.int32, device=device)

    def for_layers(self) -> dict[str, torch.Tensor]:
        """The buffers that layers bind, at full length, by the name under which layers know them."""
        names = ("slot_mapping", "token_request", "query_start_loc", "seq_lens", "state_slots", "block_table")
        return {name: getattr(self, name).gpu for name in names}
