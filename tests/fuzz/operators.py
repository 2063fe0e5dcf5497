"""Operators at which graphs break, in every shape that a user's may have.

All but `fuzz::center` and `fuzz::append_` are row-wise, and those two see the real rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from piecewise_backend.breakpoints import register_breakpoint


def _custom_op(name: str, *, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    return torch.library.custom_op(f"fuzz::{name}", mutates_args=mutates)


@_custom_op("fresh")
def fresh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2


@fresh.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@_custom_op("pair")
def pair(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + y, (x * y).sum(-1)


@pair.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0])


@_custom_op("write_out", mutates=("out",))
def write_out(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.tanh(x) - 1)


@write_out.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None


@_custom_op("rotate_", mutates=("x",))
def rotate_(x: torch.Tensor, angle: torch.Tensor) -> None:
    half = x.shape[-1] // 2
    a, b = x[:, :half].clone(), x[:, half:].clone()
    x[:, :half] = a * angle.cos() - b * angle.sin()
    x[:, half:] = a * angle.sin() + b * angle.cos()


@rotate_.register_fake
def _(x: torch.Tensor, angle: torch.Tensor) -> None:
    return None


@_custom_op("recordable")
def recordable(x: torch.Tensor, count: int) -> torch.Tensor:
    return x * 0.5 + 1


@recordable.register_fake
def _(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.empty_like(x)


@_custom_op("center")
def center(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


@center.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@_custom_op("append_", mutates=("cache",))
def append_(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache[slots] = x
    return cache.mean(0)


@append_.register_fake
def _(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return cache.new_empty(cache.shape[1])


@_custom_op("plus_one")
def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@plus_one.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def register_breakpoints() -> None:
    """Make the operators above breakpoints; `fuzz::plus_one` stays an operator inside of a piece."""
    for op in (fresh, pair, write_out, center, append_):
        register_breakpoint(op)
    register_breakpoint(rotate_, capturable=True)
    register_breakpoint(recordable, capturable=True, owns_metadata=True)
