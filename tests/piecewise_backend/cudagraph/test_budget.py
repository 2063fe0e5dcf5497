"""Memory of all graphs told from a few, and sizes left out to stay within it."""

import pytest

from piecewise_backend.cudagraph.budget import choose_probes, drop_to_fit, estimate_bytes
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.cudagraph.sizes import default_capture_sizes
from piecewise_backend.reasons import ReasonCode
from tests.tiny import make_runner, work


def mixed(size: int) -> BatchDescriptor:
    return BatchDescriptor(mode=CUDAGraphMode.PIECEWISE, num_tokens=size)


def decode(size: int) -> BatchDescriptor:
    return BatchDescriptor(mode=CUDAGraphMode.FULL, num_tokens=size, num_reqs=size, uniform_query_len=1)


ALL = sorted([kind(size) for kind in (mixed, decode) for size in default_capture_sizes()], key=lambda d: -d.num_tokens)


def test_the_two_largest_and_the_smallest_of_each_kind_are_captured_first() -> None:
    assert sorted((d.mode.name, d.num_tokens) for d in choose_probes(ALL)) == [
        ("FULL", 1),
        ("FULL", 496),
        ("FULL", 512),
        ("PIECEWISE", 1),
        ("PIECEWISE", 496),
        ("PIECEWISE", 512),
    ]
    assert choose_probes([mixed(4)]) == [mixed(4)]


def test_an_estimate_is_within_a_fifth_of_what_graphs_take_that_share_a_pool() -> None:
    """As a GPU shows it: the largest pays for the pool, each adds a constant and a little by size."""

    def true_bytes(d: BatchDescriptor) -> int:
        each = 400_000 if d.mode is CUDAGraphMode.PIECEWISE else 140_000
        return each + 100 * d.num_tokens + (200_000_000 if d.num_tokens == 512 else 0)

    measured = {d: true_bytes(d) for d in choose_probes(ALL)}
    rest = [d for d in ALL if d not in measured]
    guess, truth = sum(estimate_bytes(rest, measured).values()), sum(map(true_bytes, rest))
    assert abs(guess - truth) < 0.2 * truth


@pytest.mark.parametrize("measured", [{}, {mixed(8): 100}, {mixed(8): 300, mixed(4): 100}])
def test_an_estimate_is_made_of_whatever_was_measured(measured: dict[BatchDescriptor, int]) -> None:
    found = estimate_bytes([mixed(6), decode(6)], measured)
    assert found[decode(6)] == 0, "nothing was measured of its kind"
    assert found[mixed(6)] == {0: 0, 1: 100, 2: 200}[len(measured)]


def test_sizes_that_save_the_least_padding_go_first() -> None:
    rest = [mixed(n) for n in (1, 2, 4, 500, 504)]
    dropped = drop_to_fit(rest, [mixed(512)], dict.fromkeys(rest, 10.0), bytes_left=35)
    assert dropped == [mixed(504), mixed(1)], "504 saves 8 rows of 512; without 4, batches of 3 would be padded to 500"


def test_what_fits_is_kept_whole() -> None:
    rest = [mixed(n) for n in (1, 2, 4)]
    assert drop_to_fit(rest, [], dict.fromkeys(rest, 10.0), bytes_left=30) == []
    assert len(drop_to_fit(rest, [], dict.fromkeys(rest, 10.0), bytes_left=-5)) == 3


def test_a_runner_leaves_sizes_out_for_a_reason_and_serves_their_batches_padded() -> None:
    sizes = list(range(2, 33, 2))
    whole = make_runner("PIECEWISE", capture_sizes=sizes)
    total = sum(s.memory_bytes for s in whole.report.sizes)
    assert abs(whole.report.estimated_graph_bytes - total) < 0.2 * total
    runner = make_runner("PIECEWISE", capture_sizes=sizes, graph_memory_budget=total // 2)
    assert sum(s.memory_bytes for s in runner.report.sizes) <= total // 2 * 1.1
    dropped = [r for r, _ in runner.report.reasons if r.code is ReasonCode.GRAPH_MEMORY_BUDGET]
    assert len(dropped) == len(sizes) - runner.report.num_captures > 0
    assert "graph_memory_budget" in dropped[0].hint
    for count in range(1, 33):
        runner.execute([work("a", list(range(count)), 0, [0, 1])])
    assert runner.report.num_replays == 32
    assert runner.report.uncaptured_runs == 0


def test_a_budget_that_is_no_number_of_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="graph_memory_budget"):
        make_runner(graph_memory_budget="1 GiB")
