"""What a model's forward writes to besides caches (a counter, a running mean): a start runs it on made-up batches, and
must leave that as it was."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from attention.layers import CachedLayer
from piecewise_backend.runner.buffers import InputBuffers
from piecewise_backend.runner.trace import BoundProgram


class OwnState:
    """`keep` before a program is run on made-up inputs; what was kept is written back at the end of the `with`."""

    def __init__(self, layers: Iterable[CachedLayer], buffers: InputBuffers) -> None:
        """Caches of `layers` and the runner's `buffers` are no state of the model's own."""
        bound = [getattr(layer, name) for layer in layers for name in layer.bound]
        others = [buffers.input_ids.gpu, buffers.last_tokens, *bound]
        self._others = {tensor.untyped_storage().data_ptr() for tensor in others}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, bound: BoundProgram) -> BoundProgram:
        """Copy each tensor that the program writes to, once, to the host: it may be large. Returns `bound`."""
        for given, value in zip(bound.program.inputs, bound.args, strict=True):
            if given.is_written and isinstance(value, torch.Tensor) and self._is_own(value):
                self._kept[id(value)] = value, value.detach().to("cpu", copy=True)
        return bound

    def _is_own(self, value: torch.Tensor) -> bool:
        return id(value) not in self._kept and value.untyped_storage().data_ptr() not in self._others

    def __enter__(self) -> OwnState:
        return self

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        for value, copy in self._kept.values():
            value.copy_(copy)
        self._kept.clear()
