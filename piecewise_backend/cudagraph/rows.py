"""The dynamic dimension: sizes that depend on it, and cutting padded values to its real rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


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

    def evaluate(self, number: Any, count: int) -> Any:
        """`number`, a traced one perhaps, when the dynamic dimension is `count`."""
        if not isinstance(number, _SYMBOLIC):
            return number
        value = number.node.expr.xreplace(dict.fromkeys(self.symbols, sympy.Integer(count)))
        return number.node.pytype(value)

    def decides(self, value: Any) -> bool:
        """Whether a traced value's sizes, or the number that it is, depend on nothing but the inputs' sizes."""
        numbers = (*value.shape, *value.stride()) if _is_strided(value) else (value,)
        symbolic = (n.node.expr.free_symbols for n in numbers if isinstance(n, _SYMBOLIC))
        return all(symbols <= self.symbols for symbols in symbolic)

    def layout(self, fake: torch.Tensor, count: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """(sizes, strides, offset in elements) of a traced tensor at `count`."""
        sizes = tuple(self.evaluate(s, count) for s in fake.shape)
        strides = tuple(self.evaluate(s, count) for s in fake.stride())
        return sizes, strides, self.evaluate(fake.storage_offset(), count)

    def dims(self, fake: Any) -> tuple[int, ...]:
        """The dimensions of a traced tensor whose size depends on the dynamic dimension."""
        if not isinstance(fake, torch.Tensor):
            return ()
        return tuple(
            d
            for d, size in enumerate(fake.shape)
            if isinstance(size, torch.SymInt) and not self.symbols.isdisjoint(size.node.expr.free_symbols)
        )

    def narrow(self, value: Any, fake: Any, count: int) -> Any:
        """`value`, made for a larger count, cut to `count`: a view; a symbolic number becomes its value."""
        if not isinstance(fake, torch.Tensor):
            return self.evaluate(fake, count) if isinstance(fake, _SYMBOLIC) else value
        for dim in self.dims(fake):
            value = value.narrow(dim, 0, self.evaluate(fake.shape[dim], count))
        return value

    def padded_regions(self, value: Any, fake: Any, count: int) -> list[tuple[int, torch.Tensor]]:
        """(dimension, view) of each region of `value` past its real rows. What repeats other memory is left out."""
        repeated = expanded_dims(value) if isinstance(value, torch.Tensor) else ()
        regions = []
        for dim in self.dims(fake):
            real, whole = self.evaluate(fake.shape[dim], count), value.shape[dim]
            if whole > real and dim not in repeated:
                regions.append((dim, first_along(value.narrow(dim, real, whole - real), repeated)))
        return regions

    def empty(self, fake: torch.Tensor, count: int) -> torch.Tensor:
        """A new zeroed tensor with the sizes and strides of `fake` at `count`."""
        sizes, strides, _ = self.layout(fake, count)
        return zeros_strided(sizes, strides, fake.dtype, fake.device)


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def zeros_strided(
    sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A new zeroed tensor; its strides may make elements overlap (an expanded tensor)."""
    return torch.zeros(span(sizes, strides), dtype=dtype, device=device).as_strided(sizes, strides)


def span(sizes: Iterable[int], strides: Iterable[int]) -> int:
    """Elements of memory from the first to the last element of a tensor, both included."""
    sizes = tuple(sizes)
    return 0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


def expanded_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions along which a tensor repeats the same memory. Such a tensor cannot be written as it is."""
    return tuple(d for d, (n, s) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if s == 0 and n > 1)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy all elements, also where `target` repeats the same memory as `source` does."""
    dims = expanded_dims(target)
    first_along(target, dims).copy_(first_along(source, dims))


def first_along(tensor: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    """The first element along each of `dims`, which stay."""
    for dim in dims:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor
