"""A model whose result depends on many kinds of Python state, and operators of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SIZE = 8
FACTOR = 2.0
TABLE: dict[str, Any] = {"mode": "positive", "gate": lambda x: x * 3}

activation = torch.sin


@torch.library.custom_op("traced_model::doubled", mutates_args=())
def doubled_operator(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@doubled_operator.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("traced_model::mean", mutates_args=())
def mean_operator(x: torch.Tensor) -> torch.Tensor:
    return x.mean(-1, keepdim=True)


@mean_operator.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], 1)


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return multiply


class Config:
    def __init__(self) -> None:
        self.factor = 1.5

    def get(self) -> float:
        return self.factor


class CountingConfig(Config):
    """Changes whenever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get(self) -> float:
        self.calls += 1
        return self.factor


class Head(nn.Module):
    offset = 0.5

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(self.linear.weight.dtype)).float() * self.factor + self.offset


class Changeable(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale, self.add_positions = 1.25, True
        self.settings, self.factors = {"shift": 0.75}, [1.0]
        self.config = Config()
        self.function = times(0.5)
        self.table = torch.zeros(SIZE, SIZE)
        self.left, self.right = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.head = Head()
        self.layers = nn.ModuleList([Head(0.5)])

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = doubled_operator(activation(x) * FACTOR) + self.table.sum()
        x = self.left(x) + self.right(x).relu() + self.config.get()
        if self.add_positions:
            x = x + positions[:, None] * self.scale
        for factor in self.factors:
            x = x * factor
        x = TABLE["gate"](x) if TABLE["mode"] == "positive" else -x
        x = x + mean_operator(x.view(-1, SIZE)) + self.settings["shift"]
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(self.function(x)))
