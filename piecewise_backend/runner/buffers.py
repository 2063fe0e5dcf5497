"""Persistent input buffers: what every captured graph reads, written anew for each step."""

from __future__ import annotations

import math

import numpy as np
import torch

_ALIGNMENT = 16
_NUM_STAGES = 3
"""Host copies in turn: while one is written, the device may still have to read those of the two steps before."""


class Arena:
    """Several buffers in one piece of device memory, sent in one copy.

    On the CPU host and device side are the same memory. On a GPU the host side is pinned and there are some of it, used
    in turn: the copy of an earlier step may not have happened yet when the next step is written.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._size = 0
        self._buffers: list[MirroredBuffer] = []
        self._stage = 0
        self._events: list[torch.cuda.Event | None] = [None] * _NUM_STAGES

    def add(self, *shape: int, dtype: torch.dtype, fill: int = 0) -> MirroredBuffer:
        """Another buffer; before `allocate`."""
        buffer = MirroredBuffer(shape, dtype, fill, self._size)
        self._size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._buffers.append(buffer)
        return buffer

    def allocate(self) -> None:
        """Make the memory of all buffers."""
        on_gpu = self.device.type != "cpu"
        count = _NUM_STAGES if on_gpu else 1
        self._host = [torch.zeros(self._size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(count)]
        self._device = torch.zeros(self._size, dtype=torch.uint8, device=self.device) if on_gpu else self._host[0]
        for buffer in self._buffers:
            buffer.attach(self._host, self._device)

    def begin(self) -> None:
        """Turn to the next host side; waits until the device has read what was sent from it."""
        self._stage = (self._stage + 1) % len(self._host)
        if (event := self._events[self._stage]) is not None:
            event.synchronize()
        for buffer in self._buffers:
            buffer.turn(self._stage)

    def send(self) -> None:
        """Send all buffers to the device, without waiting."""
        if self._device is self._host[0]:
            return
        self._device.copy_(self._host[self._stage], non_blocking=True)
        event = self._events[self._stage]
        if event is None:
            event = self._events[self._stage] = torch.cuda.Event()
        event.record()


class MirroredBuffer:
    """One buffer of an arena: `np` and `cpu` are the host side in turn, `gpu` the device side, at a fixed address."""

    np: np.ndarray
    cpu: torch.Tensor
    gpu: torch.Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, fill: int, offset: int) -> None:
        self._shape, self._dtype, self._fill, self._offset = shape, dtype, fill, offset
        self._views: dict[int, torch.Tensor] = {}
        self._host_views: dict[tuple[int, int], torch.Tensor] = {}

    def attach(self, host: list[torch.Tensor], device: torch.Tensor) -> None:
        """Take this buffer's part of its arena's memory."""
        self._host = [self._part_of(arena) for arena in host]
        self._arrays = [tensor.numpy() for tensor in self._host]
        self.gpu = self._host[0] if device is host[0] else self._part_of(device)
        for tensor in (*self._host, self.gpu):
            tensor.fill_(self._fill)
        self.turn(0)

    def turn(self, stage: int) -> None:
        """Write to this host side from now on."""
        self._stage, self.cpu, self.np = stage, self._host[stage], self._arrays[stage]

    def first(self, count: int) -> torch.Tensor:
        """Device view of the first `count` entries: the same object for the same count."""
        view = self._views.get(count)
        if view is None:
            view = self._views[count] = self.gpu[:count]
        return view

    def first_on_host(self, count: int) -> torch.Tensor:
        """The same of the host side in turn."""
        key = (self._stage, count)
        view = self._host_views.get(key)
        if view is None:
            view = self._host_views[key] = self.cpu[:count]
        return view

    def _part_of(self, arena: torch.Tensor) -> torch.Tensor:
        """Not a view of `arena` to PyTorch, only in the same memory: tracing knows nothing of the other buffers."""
        offset = self._offset // self._dtype.itemsize
        strides = [math.prod(self._shape[d + 1 :]) for d in range(len(self._shape))]
        empty = torch.empty(0, dtype=self._dtype, device=arena.device)
        return empty.set_(arena.untyped_storage(), offset, self._shape, strides)


class InputBuffers:
    """Inputs of one forward pass, sized to the largest batch.

    input_ids, positions, slot_mapping: [max_num_tokens] int64. token_request: [max_num_tokens] int32.
    query_start_loc: [max_num_reqs + 1] int32; seq_lens, state_slots: [max_num_reqs] int32; block_table:
    [max_num_reqs, max_num_blocks] int32; logits_rows: [max_num_tokens] int64. last_tokens: [max_num_reqs + 1] int64,
    device: the newest token of each request by its state slot, which may not have reached the host yet; the last entry
    is nobody's.
    """

    def __init__(self, *, max_num_tokens: int, max_num_reqs: int, max_num_blocks: int, device: torch.device) -> None:
        # Traced at 2 tokens at least (1 is never a dynamic size), and at fewer than there is room for.
        max_num_tokens = max(4, max_num_tokens)
        self.max_num_tokens = max_num_tokens
        self.max_num_reqs = max_num_reqs
        self.arena = Arena(device)
        self.input_ids = self.arena.add(max_num_tokens, dtype=torch.int64)
        self.positions = self.arena.add(max_num_tokens, dtype=torch.int64)
        self.slot_mapping = self.arena.add(max_num_tokens, dtype=torch.int64, fill=-1)
        self.logits_rows = self.arena.add(max_num_tokens, dtype=torch.int64)
        self.token_request = self.arena.add(max_num_tokens, dtype=torch.int32, fill=-1)
        self.query_start_loc = self.arena.add(max_num_reqs + 1, dtype=torch.int32)
        self.seq_lens = self.arena.add(max_num_reqs, dtype=torch.int32)
        self.state_slots = self.arena.add(max_num_reqs, dtype=torch.int32, fill=-1)
        self.block_table = self.arena.add(max_num_reqs, max_num_blocks, dtype=torch.int32)
        self.arena.allocate()
        self.last_tokens = torch.zeros(max_num_reqs + 1, dtype=torch.int64, device=device)

    def for_layers(self) -> dict[str, torch.Tensor]:
        """The buffers that layers bind, at full length, by the name under which layers know them."""
        names = ("slot_mapping", "token_request", "query_start_loc", "seq_lens", "state_slots", "block_table")
        return {name: getattr(self, name).gpu for name in names}
