import gc

import pytest
import torch

from piecewise_backend.cudagraph.checks import CaptureRefused, launches_work, why_uncapturable
from piecewise_backend.cudagraph.emulated import EmulatedRecorder

aten = torch.ops.aten


def record(recorder, run, *args, opaque=False):
    recorder.begin()
    try:
        result = recorder.call(run, args, opaque=opaque)
    except BaseException:
        recorder.abort()
        raise
    return recorder.end(), result


@pytest.fixture
def recorder() -> EmulatedRecorder:
    return EmulatedRecorder()


@pytest.mark.parametrize("opaque", [False, True])
def test_a_replay_reads_and_writes_where_it_was_recorded(recorder, opaque):
    x = torch.randn(3, 4)
    graph, y = record(recorder, lambda a: torch.relu(a @ a.t() + 1), x, opaque=opaque)
    address = y.data_ptr()
    x.copy_(torch.randn(3, 4))
    graph.replay()
    torch.testing.assert_close(y, torch.relu(x @ x.t() + 1))
    assert y.data_ptr() == address


def test_a_new_tensor_in_place_of_an_argument_is_not_seen(recorder):
    x = torch.zeros(2)
    graph, y = record(recorder, lambda a: a + 1, x)
    x = torch.ones(2)
    graph.replay()
    assert y.tolist() == [1, 1]


def test_writes_to_arguments_are_repeated(recorder):
    x, count = torch.zeros(4), torch.zeros(2)

    def run(a, count):
        count.add_(1)
        a[:2].mul_(2).add_(count)
        return a.view(2, 2).t()

    graph, view = record(recorder, run, x, count)
    graph.replay()
    assert x.tolist() == [1 * 2 + 2, 4, 0, 0]
    assert view.data_ptr() == x.data_ptr()
    assert count.tolist() == [2, 2]


def test_an_operator_that_may_copy_is_repeated_for_tensors_of_inference_mode_too(recorder):
    with torch.inference_mode():
        x = torch.randn(4)
        graph, y = record(recorder, lambda a: a.half(), x)
        x.copy_(torch.randn(4))
        graph.replay()
        torch.testing.assert_close(y, x.half())


def test_a_result_that_repeats_its_memory_is_repeated(recorder):
    x = torch.randn(4, 1)
    graph, y = record(recorder, lambda a: (a * 2).expand(4, 3), x, opaque=True)
    x.copy_(torch.randn(4, 1))
    graph.replay()
    torch.testing.assert_close(y, (x * 2).expand(4, 3))


# Poison: memory that a real pool could have given to another graph


def test_a_result_that_nobody_holds_is_destroyed_by_a_graph_recorded_later(recorder):
    x = torch.ones(4)
    first, y = record(recorder, lambda a: a + 1, x)
    kept = recorder.weaken(y)
    del y
    second, _ = record(recorder, lambda a: a + 2, x)
    first.replay()
    assert kept.tolist() == [2] * 4
    second.replay()
    assert kept.isnan().all()
    first.replay()
    assert kept.tolist() == [2] * 4


def test_a_result_that_was_held_while_another_graph_was_recorded_survives_it(recorder):
    x = torch.ones(4)
    first, y = record(recorder, lambda a: (a + 1).mul_(3).view(2, 2), x)
    second, z = record(recorder, lambda a: a + 2, y)
    del y
    kept = recorder.weaken(z)
    del z
    for _ in range(2):
        first.replay()
        second.replay()
        assert kept.tolist() == [[8, 8], [8, 8]]


def test_a_value_used_inside_a_graph_only_is_rubbish_afterwards(recorder):
    inside = []

    def run(a):
        b = a + 1
        inside.append(recorder.weaken(b))
        return b * 2

    graph, y = record(recorder, run, torch.ones(4))
    assert inside[0].isnan().all()
    graph.replay()
    assert inside[0].isnan().all()
    assert y.tolist() == [4] * 4


def test_memory_that_nothing_wrote_is_rubbish_at_every_replay(recorder):
    def run(a):
        out = torch.empty(4)
        out[:2] = a[:2]
        return out

    graph, y = record(recorder, run, torch.ones(4))
    y.zero_()
    graph.replay()
    assert y[:2].tolist() == [1, 1]
    assert y[2:].isnan().all()


def test_without_poison_memory_is_left_alone():
    recorder = EmulatedRecorder(poison=False)
    x = torch.ones(4)
    first, y = record(recorder, lambda a: a + 1, x)
    kept = recorder.weaken(y)
    del y
    second, _ = record(recorder, lambda a: a + 2, x)
    second.replay()
    assert kept.tolist() == [2] * 4
    del first


def test_a_graph_that_is_dropped_gives_its_memory_back(recorder):
    graph, y = record(recorder, lambda a: (a + 1) * 2, torch.ones(256))
    assert recorder.memory_bytes() >= 2048
    del graph, y
    gc.collect()
    assert recorder.memory_bytes() == 0


# Refusals


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "aten.index.Tensor"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: torch.unique(x), "_unique2"),
        (lambda x: bool((x > 0).all()), "_local_scalar_dense"),
    ],
)
def test_what_a_cuda_graph_refuses_is_refused_by_name(recorder, run, op):
    with pytest.raises(CaptureRefused, match=op):
        record(recorder, run, torch.randn(4))
    record(recorder, lambda x: x + 1, torch.randn(4))  # and the next recording is not affected


def test_a_copy_through_pageable_host_memory_is_refused():
    with torch._subclasses.FakeTensorMode():
        host, device = torch.empty(4), torch.empty(4, device="cuda")
    pageable = "pageable host memory"
    assert pageable in str(why_uncapturable(aten._to_copy.default, (host,), {"device": "cuda"}))
    assert pageable in str(why_uncapturable(aten._to_copy.default, (device,), {"device": "cpu"}))
    assert pageable in str(why_uncapturable(aten.copy_.default, (device, host), {}))
    assert pageable in str(why_uncapturable(aten.copy_.default, (host, device), {}))
    assert why_uncapturable(aten._to_copy.default, (device,), {"dtype": torch.half}) is None
    assert why_uncapturable(aten.copy_.default, (device, device), {}) is None


def test_a_tensor_made_of_numbers_on_a_device_is_refused_and_a_masked_fill_is_not():
    with torch._subclasses.FakeTensorMode():
        host, device = torch.empty(()), torch.empty(4, device="cuda")
        mask = torch.empty(4, dtype=torch.bool, device="cuda")
    assert "numbers on the host" in str(why_uncapturable(aten.lift_fresh.default, (device,), {}))
    assert why_uncapturable(aten.lift_fresh.default, (host,), {}) is None
    assert why_uncapturable(aten.index_put_.default, (device, [mask], host), {}) is None
    assert why_uncapturable(aten.index_put_.default, (device, [mask], host, True), {}) is not None
    assert why_uncapturable(aten.index_put_.default, (device, [mask], device), {}) is not None
    assert why_uncapturable(aten.index.Tensor, (device, [mask]), {}) is not None


def test_views_and_bare_allocations_launch_nothing():
    for op in (aten.view.default, aten.t.default, aten.empty.memory_format, aten.sym_size.int, aten.expand.default):
        assert not launches_work(op)
    for op in (aten.add.Tensor, aten.copy_.default, aten.zeros.default, aten.to.dtype, aten.reshape.default):
        assert launches_work(op)
