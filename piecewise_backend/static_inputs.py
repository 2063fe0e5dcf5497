"""Static buffers of one program's inputs: a captured graph reads them, each call's values are copied in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piecewise_backend.cudagraph.rows import TokenDim
from piecewise_backend.program import Input


class StaticInputs:
    """The buffers of one captured size.

    Which inputs are copied is decided by the caller; the others keep their own addresses. Strides are the traced
    ones at the padded size, which compiled code relies on. `rules` names what fills the padded rows of each input.
    """

    def __init__(
        self,
        inputs: Sequence[Input],
        copied: Sequence[int],
        dim: TokenDim,
        size: int,
        args: Sequence[Any],
        rules: Sequence[str],
    ) -> None:
        self.copied = tuple(copied)
        self.args = [dim.evaluate(i.fake, size) if isinstance(i.fake, torch.SymInt) else a
                     for i, a in zip(inputs, args, strict=True)]
        self._inputs, self._dim, self._size = inputs, dim, size
        self._rules = rules
        self._views: dict[int, tuple[list[torch.Tensor], list[tuple[int, int, torch.Tensor]]]] = {}
        for index in self.copied:
            self.args[index] = dim.empty(inputs[index].fake, size)

    def copy_in(self, args: Sequence[Any], count: int) -> None:
        """Copy `args`, whose dynamic dimension is `count`, and fill the padded rows; one grouped launch a dtype."""
        targets, padding = self._views.get(count) or self._make_views(count)
        if targets:
            torch._foreach_copy_(targets, [args[i] for i in self.copied])
        for index, dim, rows in padding:
            fill_rows(self._rules[index], rows, args[index], dim)

    def padded_rows(self, count: int) -> list[tuple[int, int, torch.Tensor]]:
        """(input, dimension, view) of every region past `count` real rows."""
        regions = []
        for index in self.copied:
            fake = self._inputs[index].fake
            for dim in self._dim.dims(fake):
                real = self._dim.evaluate(fake.shape[dim], count)
                whole = self._dim.evaluate(fake.shape[dim], self._size)
                if whole > real:
                    regions.append((index, dim, self.args[index].narrow(dim, real, whole - real)))
        return regions

    def _make_views(self, count: int) -> tuple[list[torch.Tensor], list[tuple[int, int, torch.Tensor]]]:
        targets = [self._dim.narrow(self.args[i], self._inputs[i].fake, count) for i in self.copied]
        padding = [region for region in self.padded_rows(count) if self._rules[region[0]] != "leave"]
        self._views[count] = (targets, padding)
        return targets, padding


def fill_rows(rule: str, rows: torch.Tensor, real: torch.Tensor, dim: int) -> None:
    """Fill padded `rows` along `dim` by `rule`, given the `real` rows of the same input."""
    if rule == "zero":
        rows.zero_()
    elif rule == "minus_one":
        rows.fill_(-1)
    elif rule == "repeat_last":
        last = real.narrow(dim, real.shape[dim] - 1, 1)
        if last.shape == tuple(1 if d == dim else n for d, n in enumerate(rows.shape)):
            rows.copy_(last.expand_as(rows))
        else:  # padded in several dimensions: any valid value serves
            rows.fill_(last.reshape(-1)[0])
    else:
        assert rule == "leave", f"unknown padding rule {rule!r}"


def default_rule(fake: torch.Tensor) -> str:
    """Floats keep what the rows held (the proof of padding covers any content); integers, which may be indices, and
    booleans repeat the last real row, since only values that occur are known to be valid."""
    return "leave" if fake.dtype.is_floating_point or fake.dtype.is_complex else "repeat_last"
