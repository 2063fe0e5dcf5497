"""The one dimension whose size varies: what it is in each tensor, and how a padded tensor is cut to its real rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class RealRows:
    """How many rows of the padded batch are real; read by operators that are given real rows only."""

    __slots__ = ("count",)

    def __init__(self, count: int = 0) -> None:
        self.count = count


class TokenDim:
    """The dynamic dimension of a traced graph.

    `symbols`: the shape symbols that stand for it; all take the same value. Sizes of traced ("fake") values are
    expressions over them.
    """

    def __init__(self, symbols: Iterable[Any]) -> None:
        self.symbols = frozenset(symbols)

    def __bool__(self) -> bool:
        return bool(self.symbols)

    def evaluate(self, size: int | torch.SymInt, count: int) -> int:
        """`size` when the dynamic dimension is `count`."""
        if isinstance(size, int):
            return size
        return int(size.node.expr.xreplace(dict.fromkeys(self.symbols, count)))

    def dims(self, fake: Any) -> tuple[int, ...]:
        """The dimensions of a traced tensor whose size depends on the dynamic dimension."""
        if not isinstance(fake, torch.Tensor):
            return ()
        return tuple(
            d for d, size in enumerate(fake.shape)
            if isinstance(size, torch.SymInt) and not self.symbols.isdisjoint(size.node.expr.free_symbols)
        )

    def narrow(self, value: Any, fake: Any, count: int) -> Any:
        """`value`, made for a larger count, cut to `count`: a view; a symbolic int becomes its value."""
        if isinstance(fake, torch.SymInt):
            return self.evaluate(fake, count)
        for dim in self.dims(fake):
            value = value.narrow(dim, 0, self.evaluate(fake.shape[dim], count))
        return value

    def empty(self, fake: torch.Tensor, count: int) -> torch.Tensor:
        """A new zeroed tensor with the sizes and strides of `fake` at `count`."""
        sizes = [self.evaluate(s, count) for s in fake.shape]
        strides = [self.evaluate(s, count) for s in fake.stride()]
        return torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device).zero_()
