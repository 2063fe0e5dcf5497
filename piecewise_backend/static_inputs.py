"""Static buffers of one program's inputs: a captured graph reads them, each call's values are copied in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecewise_backend.cudagraph.rows import TokenDim, expanded_dims, first_along, span, zeros_strided
from piecewise_backend.program import Input


class StaticMemory:
    """Memory of the buffers, shared by all padded sizes of a program: a buffer is sized to the largest of them."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self._flat: dict[int, torch.Tensor] = {}

    def buffer(self, index: int, fake: torch.Tensor, dim: TokenDim, size: int) -> torch.Tensor:
        """A buffer for input `index`, with the traced strides at `size`."""
        sizes, strides, _ = dim.layout(fake, size)
        flat = self._flat.get(index)
        if flat is None or flat.numel() < span(sizes, strides):
            most = span(*dim.layout(fake, max(size, self.largest))[:2])
            flat = self._flat[index] = torch.zeros(most, dtype=fake.dtype, device=fake.device)
        return flat.as_strided(sizes, strides)


class StaticInputs:
    """The buffers of one captured size.

    Which inputs are copied is decided by the caller; the others keep their own addresses. Compiled code relies on
    strides, so buffers have the traced ones at the padded size. `rules` names what fills the padded rows of each input.
    Without a `size` nothing is padded, and each buffer is laid out as the argument it was made for.
    """

    def __init__(
        self,
        inputs: Sequence[Input],
        copied: Sequence[int],
        args: Sequence[Any],
        rules: Sequence[str],
        *,
        dim: TokenDim,
        size: int | None,
        memory: StaticMemory | None = None,
    ) -> None:
        self.copied = tuple(copied)
        self._inputs, self._rules, self._dim, self._size = inputs, rules, dim, size
        self.args = list(args)
        if size is not None:
            memory = memory or StaticMemory(size)
            self.args = [
                dim.evaluate(i.fake, size) if isinstance(i.fake, torch.SymInt) else a
                for i, a in zip(inputs, args, strict=True)
            ]
        for index in self.copied:
            if size is None:
                arg = args[index]
                self.args[index] = zeros_strided(arg.shape, arg.stride(), arg.dtype, arg.device)
            else:
                assert memory is not None
                self.args[index] = memory.buffer(index, inputs[index].fake, dim, size)

    def bind(self, count: int) -> CopyIn:
        """How arguments whose dynamic dimension is `count` get in."""
        plan = CopyIn()
        groups: dict[Any, tuple[list[torch.Tensor], list[int]]] = {}
        for index in self.copied:
            target = self._real_rows(index, count)
            if repeated := expanded_dims(self.args[index]):
                plan.expanded.append((first_along(target, repeated), index, repeated))
            else:
                targets, indices = groups.setdefault((target.dtype, target.device), ([], []))
                targets.append(target)
                indices.append(index)
        plan.groups = list(groups.values())
        for index, dim, rows in self.padded_rows(count):
            plan.fill(self._rules[index], rows, self._last_row(index, dim, count))
        return plan

    def padded_rows(self, count: int) -> list[tuple[int, int, torch.Tensor]]:
        """(input, dimension, view) of every region past `count` real rows."""
        if self._size is None:
            return []
        return [
            (index, dim, rows)
            for index in self.copied
            for dim, rows in self._dim.padded_regions(self.args[index], self._inputs[index].fake, count)
        ]

    def _extent(self, index: int, dim: int, count: int) -> int:
        return self._dim.evaluate(self._inputs[index].fake.shape[dim], count)

    def _real_rows(self, index: int, count: int) -> torch.Tensor:
        buffer = self.args[index]
        return buffer if self._size is None else self._dim.narrow(buffer, self._inputs[index].fake, count)

    def _last_row(self, index: int, dim: int, count: int) -> torch.Tensor | None:
        real = self._extent(index, dim, count)
        buffer = first_along(self.args[index], expanded_dims(self.args[index]))
        return buffer.narrow(dim, real - 1, 1) if real else None


@dataclass(slots=True, eq=False)
class CopyIn:
    """Copies the arguments of one call into the buffers and fills the padded rows. Its views are made once."""

    groups: list[tuple[list[torch.Tensor], list[int]]] = field(default_factory=list)
    """(targets, arguments) of one dtype and device: one launch each."""
    expanded: list[tuple[torch.Tensor, int, tuple[int, ...]]] = field(default_factory=list)
    """(target, argument, dimensions that repeat the same memory)."""
    repeats: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """(padded rows, the last real row), both in the buffer."""
    zeros: list[torch.Tensor] = field(default_factory=list)
    minus_ones: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, args: Sequence[Any]) -> None:
        for targets, indices in self.groups:
            torch._foreach_copy_(targets, [args[i] for i in indices])
        for target, index, repeated in self.expanded:
            target.copy_(first_along(args[index], repeated))
        for rows, last in self.repeats:
            rows.copy_(last)
        if self.zeros:
            torch._foreach_zero_(self.zeros)
        for rows in self.minus_ones:
            rows.fill_(-1)

    def fill(self, rule: str, rows: torch.Tensor, last: torch.Tensor | None) -> None:
        """Fill the padded `rows` by `rule` at every call."""
        if rule == "repeat_last" and last is not None:
            self.repeats.append((rows, last.expand_as(rows)))
        elif rule in ("zero", "repeat_last"):  # of no rows, the last is taken to be 0
            self.zeros.append(rows)
        elif rule == "minus_one":
            self.minus_ones.append(rows)
        else:
            assert rule == "leave", f"unknown padding rule {rule!r}"


def padding_rule(padding: Any, name: str, fake: Any) -> str:
    """The declared rule for an input, or the default of its dtype."""
    if isinstance(padding, str):
        return padding
    for asked, rule in (padding or {}).items():
        if asked in (name, plain_name(name)):
            return rule
    return default_rule(fake) if isinstance(fake, torch.Tensor) else "leave"


def plain_name(name: str) -> str:
    """An input's name as the model has it: "x" of "l_x_"."""
    return name.strip("_").removeprefix("l_")


def unused_padding(padding: Any, names: Iterable[str]) -> list[str]:
    """Names in `padding` that are no input's."""
    known = {known for name in names for known in (name, plain_name(name))}
    return [] if isinstance(padding, str) else [asked for asked in padding if asked not in known]


def default_rule(fake: torch.Tensor) -> str:
    """Floats keep what the rows held (the proof of padding covers any content); integers, which may be indices, and
    booleans repeat the last real row, since only values that occur are known to be valid."""
    return "leave" if fake.dtype.is_floating_point or fake.dtype.is_complex else "repeat_last"
