"""Plain callers on real CUDA graphs, against eager."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from piecewise_backend import ReasonCode
from piecewise_backend.backend import mrv2

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(1, -1, 4, 16).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class WritesACache(nn.Module):
    def forward(self, cache: torch.Tensor, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, position, x)
        return cache.sum(dim=0) * 2


def compiled(model: nn.Module, **options: object):
    found = []

    def backend(gm, example_inputs, **kwargs):
        found.append(mrv2(gm, example_inputs, options={"cache": False, **options}))
        return found[-1]

    return torch.compile(model, backend=backend), found


@torch.no_grad()
def test_random_sizes_equal_eager_and_are_replayed() -> None:
    model = nn.Sequential(Block(), Block()).cuda()
    call, found = compiled(model, capture_sizes=[8, 16, 32, 64])
    torch.manual_seed(0)
    kept = []
    for _ in range(80):
        x = torch.randn(int(torch.randint(1, 80, ())), 64, device="cuda")
        expected, got = model(x), call(x)
        torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
        kept.append((got, got.clone()))
    for got, copy in kept:
        assert torch.equal(got, copy), "an earlier result changed"
    assert sum(f.report.num_replays for f in found) > 30
    codes = set().union(*(f.report.reasons.codes() for f in found))
    assert ReasonCode.CAPTURE_FAILED not in codes
    assert ReasonCode.CROSS_ROW not in codes


@torch.no_grad()
def test_a_written_cache_is_written_once_per_call() -> None:
    model = WritesACache()
    call, found = compiled(model)
    cache, expected_cache = torch.zeros(16, 8, device="cuda"), torch.zeros(16, 8, device="cuda")
    for step in range(12):
        x, position = torch.randn(1, 8, device="cuda"), torch.tensor([step], device="cuda")
        torch.testing.assert_close(call(cache, x, position), model(expected_cache, x, position))
        torch.testing.assert_close(cache, expected_cache)
    assert found[0].report.num_replays >= 9


@torch.no_grad()
def test_a_smaller_graph_replayed_in_between_spoils_no_larger_one() -> None:
    """R16, on a real pool."""
    model = nn.Sequential(Block(), Block(), Block()).cuda()
    call, _ = compiled(model, capture_sizes=[16, 256])
    large, small = torch.randn(256, 64, device="cuda"), torch.randn(16, 64, device="cuda")
    for x in (large, small, large, small, large, small, large, small, large):
        torch.testing.assert_close(call(x), model(x), atol=2e-3, rtol=2e-3)


@torch.no_grad()
def test_a_graph_that_cannot_be_recorded_runs_between_graphs_and_says_where() -> None:
    class Syncs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y = y[y > 0]
            return y + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call, found = compiled(Syncs())
        for _ in range(4):
            x = torch.randn(32, device="cuda")
            torch.testing.assert_close(call(x), Syncs()(x))
    assert ReasonCode.PIECE_NOT_CAPTURABLE in found[0].report.reasons.codes()


@torch.no_grad()
def test_random_numbers_differ_from_replay_to_replay() -> None:
    call, found = compiled(nn.Dropout(0.5).train())
    x = torch.ones(1000, device="cuda")
    results = [call(x) for _ in range(5)]
    assert found[0].report.num_replays >= 3
    assert not torch.equal(results[-1], results[-2])


@torch.no_grad()
def test_graphs_are_recorded_again_after_all_earlier_ones_are_gone() -> None:
    """R18: discarding every graph of the shared pool and recording into it again fails no assertion."""
    model, x = Block().cuda(), torch.randn(8, 64, device="cuda")
    for _ in range(3):
        call, found = compiled(model)
        for _ in range(4):
            torch.testing.assert_close(call(x), model(x), atol=2e-3, rtol=2e-3)
        assert found[0].report.num_replays >= 2
        assert ReasonCode.CAPTURE_FAILED not in found[0].report.reasons.codes()
        del call, found
        torch._dynamo.reset()
        gc.collect()


@torch.library.custom_op("mrv2_tests::hidden_sync", mutates_args=())
def hidden_sync(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum().item() > -1e9)


@hidden_sync.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.no_grad()
def test_a_recording_that_fails_harms_neither_later_recordings_nor_random_numbers() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return hidden_sync(x * 2) + 1

    call, found = compiled(Fails())
    x = torch.randn(8, 64, device="cuda")
    for _ in range(4):
        torch.testing.assert_close(call(x), x * 2 + 1)
    assert ReasonCode.CAPTURE_FAILED in found[0].report.reasons.codes()
    torch.randn(3, device="cuda")
    model = Block().cuda()
    call, found = compiled(model)
    for _ in range(4):
        torch.testing.assert_close(call(x), model(x), atol=2e-3, rtol=2e-3)
    assert found[0].report.num_replays >= 2
