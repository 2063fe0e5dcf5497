"""Plain callers where something cannot be recorded."""

import pytest
import torch
from torch import Tensor

from piecewise_backend.cudagraph.emulated import EmulatedRecorder
from piecewise_backend.reasons import FallbackError, ReasonCode
from tests.piecewise_backend.calling import Compiled
from tests.piecewise_backend.plain_operators import (
    breakpoints,  # noqa: F401  (for every test)
    check,
    double,
    recordable,
    rows,
)


class _FailingRecorder(EmulatedRecorder):
    """Fails at the end of the recording number `fails_at`."""

    def __init__(self, error: Exception, fails_at: int) -> None:
        super().__init__()
        self.error, self.left = error, fails_at

    def end(self):
        graph = super().end()
        self.left -= 1
        if self.left == 0:
            raise self.error
        return graph


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("no memory"), ReasonCode.OUT_OF_MEMORY),
        (RuntimeError("operation not permitted when stream is capturing"), ReasonCode.CAPTURE_FAILED),
    ],
)
def test_a_capture_that_fails_halfway_drops_its_size_alone_and_leaves_state_written_once(error, code):
    def model(x, cache):
        cache.add_(1)
        y = double(x + cache[0])
        cache.mul_(2)
        return y + cache[0]

    compiled = Compiled(model, capture_sizes=(2, 4), capture_after=2)
    cache, expected_cache = torch.ones(3, 4), torch.ones(3, 4)

    def call(n):
        x = rows(n)
        expected = model(x.clone(), expected_cache)
        torch.testing.assert_close(compiled(x, cache), expected)
        torch.testing.assert_close(cache, expected_cache)

    call(4)
    compiled.caller.recorder = _FailingRecorder(error, fails_at=2)  # the first graph was recorded, and did its work
    call(4)
    call(4)
    assert compiled.report.num_captures == 0
    assert "4 rows" in compiled.detail(code)
    for _ in range(3):
        call(2)
    assert [s.num_tokens for s in compiled.report.sizes] == [2]


class _DeferringRecorder(EmulatedRecorder):
    """Like CUDA: nothing is carried out while it is recorded, and a first call must not happen then."""

    executes = False
    recording = False

    def begin(self):
        super().begin()
        self.recording = True

    def end(self):
        self.recording = False
        return super().end()


@pytest.mark.parametrize("n", [3, 4])
def test_what_is_set_up_at_a_first_call_is_set_up_before_recording(n):
    recorder, initialised = _DeferringRecorder(), []

    @torch.library.custom_op("plain::lazy", mutates_args=("cache",))
    def lazy(x: Tensor, cache: Tensor) -> Tensor:
        if x.shape not in initialised:
            assert not recorder.recording, "a first call while recording"
            initialised.append(x.shape)
        cache.add_(1)
        return x + 1

    lazy.register_fake(lambda x, cache: torch.empty_like(x))
    compiled = Compiled(lambda x, cache: lazy(x, cache) * 2, capture_sizes=(4,), capture_after=2)
    cache = torch.zeros(2)
    check(compiled, lambda x, cache: (x + 1) * 2, rows(n), cache)
    compiled.caller.recorder = recorder
    initialised.clear()
    check(compiled, lambda x, cache: (x + 1) * 2, rows(n), cache)
    assert compiled.report.num_captures == 1
    assert ReasonCode.CAPTURE_FAILED not in compiled.codes


def test_a_fallback_is_an_error_where_asked_for():
    compiled = Compiled(lambda x: x + 1, capture_sizes=(4,), on_fallback="error")
    compiled(rows(4))
    with pytest.raises(FallbackError, match="above_all_sizes"):
        compiled(rows(5))


def test_a_piece_that_cannot_be_recorded_is_named_with_its_line_and_the_rest_is_captured():
    def model(x):
        y = double(x + 1)
        z = y * 1
        z[z > 0] = z[0, 0]
        return recordable(double(z)) + 1

    compiled = Compiled(model, capture_sizes=(4,), mode="PIECEWISE")
    for _ in range(3):
        check(compiled, model, rows(4))
    assert compiled.report.sizes[0].num_graphs == 2
    detail = compiled.detail(ReasonCode.PIECE_NOT_CAPTURABLE)
    assert "index_put_" in detail
    assert "z[z > 0] = z[0, 0]" in detail
    assert "test_plain_failures.py" in detail


def test_a_number_that_depends_on_data_is_never_baked_into_a_graph():
    def model(x):
        n = x.max().item()
        return double(x) * n

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = Compiled(model)
        for _ in range(3):
            check(compiled, model, torch.randn(4, 4), dynamic=())
    assert compiled.report.num_captures == 0
    assert "depends on data" in [str(r) for r, _ in compiled.report.reasons][-1]
