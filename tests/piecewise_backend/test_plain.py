"""Plain callers: replays, limits and modes."""

import pytest
import torch
import torch.nn.functional as F

from piecewise_backend.reasons import ReasonCode
from tests.piecewise_backend.calling import Compiled
from tests.piecewise_backend.plain_operators import (
    breakpoints,  # noqa: F401  (for every test)
    check,
    double,
    recordable,
    rows,
)


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
