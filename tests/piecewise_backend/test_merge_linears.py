"""Linear layers of one input as one matrix product."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from piecewise_backend.config import parse_options
from piecewise_backend.runner.trace import BoundProgram, trace

WIDTHS = {"q": 16, "k": 8, "v": 8}


class Projections(nn.Module):
    def __init__(self, bias: bool = False, flat: bool = False) -> None:
        super().__init__()
        self.flat = flat
        self.embed = nn.Embedding(50, 12)
        self.q, self.k, self.v = (nn.Linear(12, width, bias=bias) for width in WIDTHS.values())
        self.gate, self.up, self.down = (nn.Linear(32, 20), nn.Linear(32, 20), nn.Linear(20, 4))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + positions[:, None]
        q, k, v = self.q(x).view(-1, 2, 8), self.k(x).view(-1, 1, 8), self.v(x)
        if self.flat:
            q = q.view(-1).view(-1, 2, 8)  # impossible for a part of something wider
        joined = torch.cat([q.flatten(1), k[:, 0], v], dim=1)
        return self.down(silu(self.gate(joined)) * self.up(joined))


def traced(model: nn.Module, **options: object) -> BoundProgram:
    parsed = parse_options({"compiler": "eager", "cache": False, "recorder": "none", **options})
    buffers = (torch.arange(16), torch.arange(16))
    with torch.no_grad():
        return trace(model.requires_grad_(False), buffers, 15, parsed)


def num_products(bound: BoundProgram) -> int:
    modules = [step.run.__self__ for step in bound.program.steps]
    return sum(n.target in (torch.nn.functional.linear, torch._C._nn.linear) for m in modules for n in m.graph.nodes)


def assert_right(bound: BoundProgram, model: nn.Module) -> None:
    for count in (1, 5, 16):
        (got,) = bound.run(count)
        torch.testing.assert_close(got, model(torch.arange(count), torch.arange(count)), atol=1e-5, rtol=1e-4)


def test_six_products_become_three_with_the_same_results() -> None:
    for bias in (False, True):
        model = Projections(bias)
        apart = traced(Projections(bias), merge_linears=False)
        merged = traced(model)
        assert (num_products(apart), num_products(merged)) == (6, 3)
        assert_right(merged, model)


def test_the_model_keeps_its_parameters_as_views_of_the_merged_ones() -> None:
    model = Projections()
    before = {name: p.clone() for name, p in model.named_parameters()}
    bound = traced(model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.q.weight.untyped_storage().data_ptr() == model.v.weight.untyped_storage().data_ptr()
    model.k.weight.data.mul_(3)
    assert_right(bound, model)


def test_a_second_runner_of_the_same_weights_takes_no_more_memory() -> None:
    model = Projections()
    traced(model)
    address = model.q.weight.data_ptr()
    assert_right(traced(model), model)
    assert model.q.weight.data_ptr() == address


def test_parts_that_a_later_node_cannot_take_stay_apart() -> None:
    model = Projections(flat=True)
    addresses = [p.data_ptr() for p in model.parameters()]
    bound = traced(model)
    assert num_products(bound) == 6
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert_right(bound, model)


def test_a_weight_that_two_layers_share_is_left_alone() -> None:
    model = Projections()
    model.up.weight = model.gate.weight
    bound = traced(model)
    assert num_products(bound) == 4
    assert_right(bound, model)


class InRegions(Projections):
    """`region` holds for the middle of it: projections before, inside and after read the same tensor."""

    def __init__(self, region) -> None:
        super().__init__()
        self.region = region
        self.w = nn.Linear(12, 8, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + positions[:, None]
        q, k = self.q(x).view(-1, 2, 8), self.k(x).view(-1, 1, 8)
        with self.region():
            inner = torch.cat([self.w(x), self.v(x)], dim=1)
            scores = (q * k).flatten(1).matmul(q.new_ones(16, 16))
            joined = torch.cat([scores, inner], dim=1)
            gate, up = self.gate(joined), self.up(joined)
        return self.down((silu(gate) * up).float())


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("region", [contextlib.nullcontext, autocast, torch.inference_mode])
def test_products_of_an_autocast_region_keep_its_dtype(compiler, region) -> None:
    model = InRegions(region)
    bound = traced(model, compiler=compiler)
    inside = torch.bfloat16 if region is autocast else torch.float32
    for count in (1, 5, 16):
        (got,) = bound.run(count)
        expected = model(torch.arange(count), torch.arange(count))
        tolerance = 0.05 if inside is torch.bfloat16 else 1e-4
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    assert not torch.is_autocast_enabled("cpu")


def test_products_of_one_tensor_on_both_sides_of_a_region_stay_apart() -> None:
    assert num_products(traced(InRegions(autocast))) == 4
    assert num_products(traced(InRegions(contextlib.nullcontext))) == 3


def test_an_example_that_cannot_be_found_again_leaves_no_autocast_region_open() -> None:
    class Flat(Projections):
        def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            with autocast():
                return super().forward(ids, positions)

    bound = traced(Flat(flat=True))
    assert num_products(bound) == 6
    assert not torch.is_autocast_enabled("cpu")


WRITES = {
    "nothing": lambda x, q: None,
    "a method": lambda x, q: x.mul_(2),
    "an item": lambda x, q: x.__setitem__((slice(None), slice(0, 3)), 0.0),
    "an output": lambda x, q: torch.add(x, 1, out=x),
    "a flag": lambda x, q: torch.nn.functional.relu(x, True),
    "a view": lambda x, q: x.view(-1)[1::2].zero_(),
    "a part": lambda x, q: q.mul_(2),
    "its shape": lambda x, q: x.unsqueeze_(0).squeeze_(0),
}


class Written(Projections):
    """Its input is written between the projections that read it."""

    def __init__(self, write) -> None:
        super().__init__()
        self.write = write

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + positions[:, None]
        q = self.q(x)
        self.write(x, q)
        k, v = self.k(x), self.v(x)
        joined = torch.cat([q, k, v], dim=1)
        return self.down(silu(self.gate(joined)) * self.up(joined))


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("name", WRITES)
def test_products_of_a_tensor_that_is_written_in_between_stay_apart(name: str, compiler: str) -> None:
    model = Written(WRITES[name])
    bound = traced(model, compiler=compiler)
    assert_right(bound, model)
    if compiler == "eager":
        assert num_products(bound) == (3 if name in ("nothing", "a part") else 4)
