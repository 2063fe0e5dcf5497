"""Products called ahead are those of the program that is recorded, whether it was traced or read from disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from attention.kernels.linear import MAX_ROWS, uses_library
from piecewise_backend.config import Options
from piecewise_backend.runner.products_ahead import ProductsAhead, call_products, distinct_products
from piecewise_backend.runner.trace import trace
from tests.tiny import make_runner

HIDDEN = 8


class Model(nn.Module):
    """Two products that become one, one without a bias, and one with a weight that is no input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(HIDDEN, 12), nn.Linear(HIDDEN, 12)
        self.down = nn.Linear(12, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        h = self.down(self.up(x) * self.gate(x))
        return torch.nn.functional.linear(h, self.down.weight.T[:5, :HIDDEN])


class Spy(ProductsAhead):
    """Takes note instead of calling."""

    def __init__(self) -> None:
        super().__init__([4], torch.device("cpu"))
        self.products: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def call(self, places: Sequence[Any], inputs: Sequence[Any]) -> None:
        assert not self.products, "told twice"
        self.products = distinct_products(places, inputs)


def start(model: Model, folder: Path) -> tuple[Spy, str]:
    torch._dynamo.reset()
    spy = Spy()
    x, positions = torch.randn(16, HIDDEN), torch.arange(16)
    bound = trace(model, (x, positions), 7, Options(cache_dir=folder), products=spy)
    with torch.no_grad():
        torch.testing.assert_close(bound.run(3)[0], model(x[:3], positions[:3]))
    return spy, bound.report.program_source


def test_a_traced_program_and_one_from_disk_tell_of_the_same_merged_layers(tmp_path: Path) -> None:
    model = Model().eval().requires_grad_(False)
    for expected_source in ("traced", "disk"):
        spy, source = start(model, tmp_path)
        assert source == expected_source
        layouts = [(tuple(weight.shape), None if bias is None else len(bias)) for weight, bias in spy.products]
        assert layouts == [((24, HIDDEN), 24), ((HIDDEN, 12), None)]
        assert spy.products[0][0].data_ptr() == model.up.weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_library_is_called_for_every_size_that_it_will_serve(dtype: torch.dtype, monkeypatch) -> None:
    seen = []
    plain = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append((len(x), tuple(weight.shape)))
        return plain(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    weights = [torch.empty(size, 16, dtype=dtype) for size in (8, 10000)]
    sizes = [1, 8, 17, MAX_ROWS, MAX_ROWS + 1, 200]
    calls = call_products([(weight, None) for weight in weights], sizes)
    expected = [(rows, tuple(w.shape)) for w in weights for rows in sizes if uses_library(rows, w, None)]
    assert seen == expected
    assert len(seen) == calls
    assert {(200, (8, 16)), (MAX_ROWS + 1, (10000, 16))} <= set(seen)
    if dtype is torch.float32:
        assert calls == 12
    else:
        assert (1, (8, 16)) not in seen


def test_nothing_is_called_on_the_cpu(monkeypatch) -> None:
    monkeypatch.setattr("piecewise_backend.runner.products_ahead.call_products", lambda *_: pytest.fail("called"))
    make_runner("FULL", capture_sizes=[2, 4])
