"""Plain callers with inputs of every sort."""

import torch
import torch.nn.functional as F

from piecewise_backend.reasons import ReasonCode
from tests.piecewise_backend.calling import Compiled
from tests.piecewise_backend.plain_operators import (
    breakpoints,  # noqa: F401  (for every test)
    check,
    double,
    rows,
)


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
