"""Plain callers of models that write to memory: arguments, caches, parameters."""

import gc
import itertools
import weakref

import numpy as np
import torch

from piecewise_backend.cudagraph.emulated import EmulatedRecorder
from piecewise_backend.reasons import ReasonCode
from tests.piecewise_backend.calling import Compiled
from tests.piecewise_backend.plain_operators import (
    attend,
    breakpoints,  # noqa: F401  (for every test)
    check,
    rotate_,
    rows,
)


def test_an_op_that_writes_its_argument_in_place_is_captured():
    """R12"""

    def model(x, angle):
        y = x * 1
        rotate_(y, angle)
        return y + 1

    compiled = Compiled(model, capture_sizes=(4,))
    angle = torch.tensor(0.3)  # a 0-dim tensor on the host
    for n in (4, 3, 4):
        check(compiled, model, rows(n), angle)
    assert compiled.report.num_captures == 1
    assert compiled.report.num_replays == 2
    check(compiled, model, rows(4), torch.tensor(0.7))


def test_a_host_scalar_among_device_tensors_is_refused_by_name():
    """R12"""
    from torch._subclasses import FakeTensorMode

    from piecewise_backend.backend import _obstacles
    from piecewise_backend.program import Input

    with FakeTensorMode():
        scale, x = torch.empty(()), torch.empty(4, device="cuda")

    class Given:
        inputs = (Input("x", x, False, False, 0), Input("scale", scale, False, False, 1))

    (reason,) = _obstacles(Given(), EmulatedRecorder())
    assert reason.code is ReasonCode.INPUT_NOT_STATIC
    assert reason.subject == "scale"


def test_an_out_argument_is_written_where_it_lies_without_a_copy():
    """R13"""

    def model(x, out):
        attend(x + 1, out)
        return x * 2

    compiled = Compiled(model)
    out = torch.empty(4, 4)
    for _ in range(3):
        x = torch.randn(4, 4)
        compiled(x, out, dynamic=())
        torch.testing.assert_close(out, (x + 1) * 2)
    assert compiled.report.num_replays == 2
    operations = [
        str(node.target) for step in compiled.program.steps if step.breakpoint is None
        for node in step.run.__self__.graph.nodes if node.op == "call_function"
    ]  # fmt: skip
    assert len(operations) == 2
    assert not [name for name in operations if "copy" in name or "clone" in name]


def test_a_cache_that_moved_is_captured_again_with_its_reason():
    def model(x, cache):
        cache.add_(x.shape[1])
        return x + cache[0]

    compiled = Compiled(model, capture_sizes=(4,))
    cache = torch.zeros(3, 4)
    for move in (False, False, True, False):
        if move:
            cache = cache.clone()
        expected_cache = cache + 4
        x = rows(4)
        torch.testing.assert_close(compiled(x, cache), x + expected_cache[0])
        torch.testing.assert_close(cache, expected_cache)
    assert compiled.report.num_captures == 2
    assert "cache" in compiled.detail(ReasonCode.INPUT_MOVED)


def test_two_caches_that_take_turns_keep_their_graphs():
    def model(x, cache):
        cache.add_(1)
        return x + cache[0]

    compiled = Compiled(model, capture_sizes=(4,))
    caches = [torch.zeros(3, 4), torch.zeros(3, 4)]
    for _, cache in zip(range(6), itertools.cycle(caches), strict=False):
        check(compiled, model, rows(4), cache)
    assert compiled.report.num_captures == 2
    assert compiled.report.num_replays == 4
    assert [float(c[0, 0]) for c in caches] == [3, 3]


def test_caches_that_never_come_again_do_not_use_up_the_captures():
    def model(x, cache):
        cache.add_(1)
        return x + cache[0]

    compiled = Compiled(model, capture_sizes=(4,), max_captures=2)
    for _ in range(5):
        check(compiled, model, rows(4), torch.zeros(3, 4).clone())
    assert compiled.report.num_captures <= 2
    assert ReasonCode.TOO_MANY_CAPTURES not in compiled.codes


def test_a_cache_that_its_owner_lets_go_is_not_kept_by_its_graphs():
    def model(x, cache):
        cache.add_(1)
        return x + cache[0], cache[1:]

    compiled = Compiled(model, capture_sizes=(4,))
    another = torch.zeros(3, 4)  # alive, so that the next one lies elsewhere
    compiled(rows(4), another)
    memory = np.zeros((3, 4), dtype=np.float32)
    alive = weakref.ref(memory)
    cache = torch.from_numpy(memory)
    for _ in range(2):
        _, part = compiled(rows(4), cache)
    assert part.tolist() == [[2] * 4] * 2
    assert compiled.report.num_replays == 1
    del memory, cache
    assert alive() is not None  # a result lies in it
    del part
    gc.collect()
    assert alive() is None


def test_a_parameter_that_was_replaced_is_captured_again():
    model = torch.nn.Linear(4, 4).requires_grad_(False)
    compiled = Compiled(model, capture_sizes=(4,))
    compiled(rows(4))
    model.weight.data = torch.randn(4, 4)
    x = rows(4)
    torch.testing.assert_close(compiled(x), model(x))
    assert "1 recorded tensor(s) moved" in compiled.detail(ReasonCode.INPUT_MOVED)
    assert compiled.report.num_captures == 1


def test_an_input_that_newly_overlaps_written_memory_runs_as_traced():
    def model(x, cache):
        cache.add_(1)
        return x + cache[0]

    compiled = Compiled(model)
    cache = torch.zeros(4, 4)
    compiled(torch.zeros(4, 4), cache, dynamic=())
    for _ in range(2):
        torch.testing.assert_close(compiled(cache[:], cache, dynamic=()), cache + cache[0])
        torch.testing.assert_close(compiled(torch.zeros(4, 4), cache, dynamic=()), cache[0].expand(4, 4))
    assert ReasonCode.INPUTS_ALIAS in compiled.codes
