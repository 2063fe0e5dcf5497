"""Operators with the bugs that a recording brings out, and models around them."""

import torch
from torch import nn

from tests.tiny import HIDDEN, TinyDecoder

remembered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""By address: a tensor, kept so that no other one can get its address, and what came of it."""


@torch.library.custom_op("planted::remember", mutates_args=())
def remember(x: torch.Tensor) -> torch.Tensor:
    """Doubles, and takes equal addresses for equal values: right until its input is written in place."""
    if x.data_ptr() not in remembered:
        remembered[x.data_ptr()] = x, x * 2
    return remembered[x.data_ptr()][1].clone()


class Host:
    """A number of the host, and what graphs were recorded with."""

    scale = 2.0
    is_recording = False
    baked: dict[int, float] = {}  # noqa: RUF012


@torch.library.custom_op("planted::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    """Multiplies by a number of the host, which a recording at `x` keeps for good."""
    if Host.is_recording:
        Host.baked[x.data_ptr()] = Host.scale
    return x * Host.baked.get(x.data_ptr(), Host.scale)


for operator in (remember, scale):
    operator.register_fake(torch.empty_like)


def forget() -> None:
    """As if no planted operator had ever run."""
    remembered.clear()
    Host.scale, Host.is_recording = 2.0, False
    Host.baked.clear()


class DecoderThatRemembers(TinyDecoder):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, positions) + remember(self.embed(input_ids) + 1)


class Counter(nn.Module):
    """Keeps a running sum in a buffer and, if it is to, a count in Python."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("total", torch.zeros(HIDDEN))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
        self.total += x.sum(0)
        x.add_(1)
        return self.linear(x) + self.total
