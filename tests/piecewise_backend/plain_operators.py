"""Operators at which plain callers break, and the comparison of a call with eager."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from piecewise_backend.breakpoints import register_breakpoint, unregister_breakpoint
from tests.piecewise_backend.calling import Compiled


@torch.library.custom_op("plain::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return torch.bmm(x[None], 2 * torch.eye(x.shape[1])[None])[0]


@torch.library.custom_op("plain::attend", mutates_args=("out",))
def attend(x: Tensor, out: Tensor) -> None:
    out.copy_(x * 2)


@torch.library.custom_op("plain::rotate_", mutates_args=("x",))
def rotate_(x: Tensor, angle: Tensor) -> None:
    a, b = x.chunk(2, -1)
    x.copy_(torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1))


@torch.library.custom_op("plain::recordable", mutates_args=())
def recordable(x: Tensor) -> Tensor:
    return x + 1


double.register_fake(torch.empty_like)
recordable.register_fake(torch.empty_like)
attend.register_fake(lambda x, out: None)
rotate_.register_fake(lambda x, angle: None)


@pytest.fixture(autouse=True)
def breakpoints() -> Iterator[None]:
    for op in (double, attend):
        register_breakpoint(op)
    register_breakpoint(recordable, capturable=True, owns_metadata=True)
    yield
    for op in (double, attend, recordable):
        unregister_breakpoint(op)


def rows(n: int, features: int = 4) -> Tensor:
    return torch.randn(n, features)


def check(compiled: Compiled, function, *args: Tensor, dynamic=(0,)) -> None:
    expected = function(*[a.clone() for a in args])
    torch.testing.assert_close(compiled(*args, dynamic=dynamic), expected)
