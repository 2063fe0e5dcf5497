import gc
import itertools
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from piecewise_backend.breakpoints import register_breakpoint, unregister_breakpoint
from piecewise_backend.cudagraph.emulated import EmulatedRecorder
from piecewise_backend.reasons import FallbackError, ReasonCode
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


# Replays


def test_sizes_are_padded_to_capture_sizes_and_replayed():
    def model(x):
        return F.gelu(x) + 1, x.shape[0]

    compiled = Compiled(model, capture_sizes=(4, 8))
    for n in (3, 4, 7, 8, 5, 3):
        check(compiled, model, rows(n))
    assert [s.num_tokens for s in compiled.report.sizes] == [4, 8]
    assert compiled.report.num_replays == 4
    assert sum(s.padded_rows for s in compiled.report.sizes) == 3 + 1


def test_fifty_sizes_make_three_recordings_and_every_other_call_has_a_reason():
    """R21"""

    def model(x):
        return double(F.relu(x)) * 3

    compiled = Compiled(model, capture_sizes=(8, 16, 32), max_padding_waste=0.5)
    for n in range(2, 52):
        check(compiled, model, rows(n))
    report = compiled.report
    assert report.num_captures == 3
    assert report.num_captures + report.num_replays + report.uncaptured_runs == 50
    counts = {reason.code: 0 for reason, _ in report.reasons}
    for reason, count in report.reasons:
        counts[reason.code] += count
    assert counts[ReasonCode.ABOVE_ALL_SIZES] + counts[ReasonCode.TOO_MUCH_PADDING] == report.uncaptured_runs


def test_an_earlier_result_is_not_changed_by_a_later_call():
    """R20"""
    compiled = Compiled(lambda x: F.gelu(x) * 2, capture_sizes=(4,))
    results = []
    for _ in range(3):
        x = rows(4)
        results.append((compiled(x), F.gelu(x) * 2))
    assert compiled.report.num_replays == 2
    for result, expected in results:
        torch.testing.assert_close(result, expected)


def test_a_result_may_be_overwritten_by_the_caller():
    compiled = Compiled(lambda x: x + 1, capture_sizes=(4,))
    for _ in range(3):
        x = rows(4)
        result = compiled(x)
        torch.testing.assert_close(result, x + 1)
        result.fill_(float("nan"))


def test_a_breakpoint_that_returns_a_fresh_result_is_right_at_every_replay():
    """R14"""

    def model(x):
        return torch.relu(double(x + 1)) + 1

    compiled = Compiled(model, capture_sizes=(4,))
    for _ in range(4):
        check(compiled, model, rows(4))
    assert compiled.report.num_replays == 3


def test_a_large_size_is_right_after_a_small_one_was_captured():
    """R16"""
    weight = torch.randn(4, 4)

    def model(x):
        return double(F.relu(x @ weight)).softmax(-1) @ weight

    compiled = Compiled(model, capture_sizes=(2, 16))
    for n in (16, 2, 16, 2, 16):
        check(compiled, model, rows(n))
    assert compiled.report.num_captures == 2
    assert compiled.report.num_replays == 3


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_size_is_captured_at_its_nth_call(after):
    compiled = Compiled(lambda x: x + 1, capture_sizes=(4,), capture_after=after)
    captures = []
    for _ in range(after):
        compiled(rows(4))
        captures.append(compiled.report.num_captures)
    assert captures == [0] * (after - 1) + [1]
    assert (ReasonCode.NOT_SEEN_TWICE in compiled.codes) == (after > 1)


# Memory that is written


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


# Failures


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
    assert "test_plain.py" in detail


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


# Limits and modes


def test_captures_stop_at_their_limit():
    compiled = Compiled(lambda x: x + 1, capture_sizes=(2, 4, 8), max_captures=2)
    for n in (2, 4, 8, 8, 2, 4):
        check(compiled, lambda x: x + 1, rows(n))
    assert compiled.report.num_captures == 2
    assert compiled.report.uncaptured_runs == 2
    assert ReasonCode.TOO_MANY_CAPTURES in compiled.codes


@pytest.mark.parametrize(("waste", "captured"), [(0.25, False), (0.5, True)])
def test_padding_beyond_the_waste_limit_runs_compiled(waste, captured):
    compiled = Compiled(lambda x: x + 1, capture_sizes=(8,), max_padding_waste=waste)
    check(compiled, lambda x: x + 1, rows(5))
    assert bool(compiled.report.num_captures) is captured
    assert (ReasonCode.TOO_MUCH_PADDING in compiled.codes) is not captured


@pytest.mark.parametrize(
    ("mode", "graphs", "eager"),
    [
        ("NONE", None, None),
        ("PIECEWISE", 2, 1),
        ("FULL", 1, 0),
        ("FULL_DECODE_ONLY", 1, 0),
        ("FULL_AND_PIECEWISE", 1, 0),
    ],
)
def test_a_mode_decides_whether_a_capturable_breakpoint_is_recorded(mode, graphs, eager):
    def model(x):
        return recordable(x * 2) * 3

    compiled = Compiled(model, capture_sizes=(4,), mode=mode)
    for _ in range(2):
        check(compiled, model, rows(4))
    sizes = compiled.report.sizes
    if graphs is None:
        assert not sizes
        assert compiled.report.mode_resolved == "NONE"
    else:
        assert [(s.num_graphs, len(s.eager_ops)) for s in sizes] == [(graphs, eager)]


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_nothing_is_captured_where_an_op_must_break_and_the_mode_wants_whole_graphs(mode):
    def model(x):
        return double(x) + 1

    compiled = Compiled(model, capture_sizes=(4,), mode=mode)
    for _ in range(3):
        check(compiled, model, rows(4))
    assert compiled.report.num_captures == 0
    assert "plain::double" in compiled.detail(ReasonCode.MODE_ADAPTED)


def test_attention_is_recorded_at_an_exact_size_and_breaks_at_a_padded_one():
    def model(x):
        q = x.view(1, -1, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q) + 1

    compiled = Compiled(model, capture_sizes=(4,))
    for n in (4, 3, 4, 3):
        check(compiled, model, rows(n, 8))
    assert [len(s.eager_ops) for s in compiled.report.sizes] == [0, 1]
    assert compiled.report.num_replays == 2
    assert ReasonCode.CROSS_ROW not in compiled.codes


def test_without_a_recorder_for_the_device_the_mode_is_none_with_a_reason():
    compiled = Compiled(lambda x: x + 1, recorder="auto")
    check(compiled, lambda x: x + 1, rows(4))
    assert compiled.report.mode_resolved == "NONE"
    assert "resolved to NONE" in compiled.detail(ReasonCode.NO_RECORDER)


# Inputs of every sort


def test_dimensions_that_vary_independently_are_captured_exactly():
    def model(x, y):
        return x.sum() * y, x + 1

    compiled = Compiled(model, capture_sizes=(8,))
    for n, m in ((3, 5), (5, 3), (3, 5), (5, 3)):
        check(compiled, model, rows(n), rows(m), dynamic=(0, 1))
    assert compiled.report.num_captures == 2
    assert compiled.report.num_replays == 2
    assert ReasonCode.SEVERAL_DYNAMIC_DIMS in compiled.codes


def test_an_expanded_input_and_an_expanded_result_are_captured():
    def model(x, wide):
        return (x + wide)[:, None].expand(-1, 3, 4)

    compiled = Compiled(model, capture_sizes=(4,))
    for n in (3, 4, 3):
        x, wide = rows(n), torch.randn(n, 1).expand(n, 4)
        result = compiled(x, wide, dynamic=(0, 1))
        expected = model(x, wide)
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()
    assert compiled.report.num_replays == 2


def test_graphs_captured_under_inference_mode_serve_calls_outside_of_it():
    weight = torch.randn(4, 4)

    def model(x):
        return double(x @ weight).half().float()

    compiled = Compiled(model, capture_sizes=(4,))
    for inference in (True, True, False, True, False):
        x = rows(4)
        with torch.inference_mode(inference):
            torch.testing.assert_close(compiled(x), model(x))


def test_a_number_argument_is_not_taken_for_a_size():
    def model(x, n):
        return x * n

    compiled = Compiled(model, capture_sizes=(8,))
    for n in (3, 5, 4, 5, 3, 4):
        x = torch.zeros(2, 4) if n == 3 else torch.ones(2, 4)
        torch.testing.assert_close(compiled(x, n, dynamic=()), x * n)


def test_a_batch_without_rows_is_right():
    compiled = Compiled(lambda x: x + 1, capture_sizes=(4,), max_padding_waste=1.0)
    for n in (3, 0, 3, 0):
        check(compiled, lambda x: x + 1, rows(n), dynamic=() if n == 0 else (0,))


def test_a_padding_rule_for_an_input_that_does_not_exist_is_named_with_those_that_do():
    compiled = Compiled(lambda x: F.relu(x) + 1, padding={"x": "zero", "z": "zero"})
    compiled(rows(3))
    reasons = [r for r, _ in compiled.report.reasons if r.code is ReasonCode.PADDING_UNUSED]
    assert [r.subject for r in reasons] == ["padding of 'z'"]
    assert reasons[0].hint == "this graph's inputs are 'x'"
