"""Example inputs of a dry run: made from a shape, and resized along the dynamic dimension."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from piecewise_backend.cudagraph.sizes import default_capture_sizes, smallest_fitting
from piecewise_backend.names import unknown_name

_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "bool")


def parse_input(text: str) -> torch.Tensor:
    """ "8x64:float32" to a tensor of that shape: random floats, or 0 and 1 in turn. ValueError for any other text."""
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ValueError(f"expected an input such as 8x64:float32, got {text!r}")
    name = found[2] or "float32"
    if name not in _DTYPES:
        raise unknown_name("input dtype", name, _DTYPES)
    shape, dtype = tuple(map(int, found[1].split("x"))), getattr(torch, name)
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 2  # valid as indices wherever two rows are
    return values.to(dtype)


class Resized:
    """The same inputs at other sizes of dimension `dim`: all tensors as long there as the first one that has it."""

    def __init__(self, inputs: Sequence[Any], dim: int) -> None:
        self.inputs, self.dim = tuple(inputs), dim
        lengths = [v.shape[dim] for v in inputs if isinstance(v, torch.Tensor) and v.dim() > dim]
        self.count = lengths[0] if lengths else 0
        """Size of the dynamic dimension as given; 0 where there is none."""
        self.varying = tuple(
            isinstance(v, torch.Tensor) and v.dim() > dim and v.shape[dim] == self.count > 0 for v in inputs
        )
        # One copy for all calls: a caller keeps one cache, and a graph that writes to it knows it by its address.
        self._kept = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in inputs]

    def at(self, count: int) -> list[Any]:
        """The inputs with `count` rows, which are those given, over and over. No tensor is the caller's own."""
        made = [self._resize(v, count) if varies else v for v, varies in zip(self._kept, self.varying, strict=True)]
        for value, varies in zip(made, self.varying, strict=True):
            if isinstance(value, torch.Tensor):  # torch remembers how sizes varied in earlier calls of the same code
                torch._dynamo.mark_static(value, [d for d in range(value.dim()) if d != self.dim or not varies])
        return made

    def _resize(self, value: torch.Tensor, count: int) -> torch.Tensor:
        rows = torch.arange(count, device=value.device) % self.count
        return value.index_select(self.dim, rows)


def sizes_to_try(count: int) -> tuple[int, ...]:
    """The default capture size that holds `count` rows, and about half of it; at least 4, since torch traces a size of
    1 for itself."""
    defaults = default_capture_sizes()
    largest = smallest_fitting(defaults, max(count, 4)) or count
    half = smallest_fitting(defaults, max(4, largest // 2)) or largest
    return tuple(sorted({half, largest}))
