import pytest
import torch

from piecewise_backend.breakpoints import (
    find_breakpoints,
    match,
    register_breakpoint,
    target_names,
    unregister_breakpoint,
)
from tests.piecewise_backend.operators import names, same_as_eager, triple


def whole(x):
    """A function that Dynamo is told to keep whole."""
    return x * 5


@pytest.mark.parametrize(
    "op",
    [
        triple,
        torch.ops.probe.triple,
        torch.ops.probe.triple.default,
        "probe::triple",
        "probe::triple.default",
        "torch.ops.probe.triple",
        "torch.ops.probe.triple.default",
    ],
)
@pytest.mark.parametrize("called", [triple, torch.ops.probe.triple, torch.ops.probe.triple.default])
def test_an_operator_is_found_by_each_of_its_names_and_however_it_is_called(op, called):
    (program,) = same_as_eager(lambda x: called(x + 1) + 1, torch.randn(3), splitting_ops=(op,))
    assert names(program) == ["piece", "probe::triple", "piece"]


def test_a_registered_operator_breaks_every_graph_until_it_is_taken_out():
    assert register_breakpoint(triple, capturable=True) is triple
    try:
        (program,) = same_as_eager(lambda x: triple(x + 1), torch.randn(3), splitting_ops=())
        assert names(program) == ["piece", "probe::triple"]
        assert program.breakpoints[0].breakpoint.capturable
    finally:
        unregister_breakpoint(triple)
    assert match(torch.ops.probe.triple, find_breakpoints()) is None


def test_splitting_ops_do_not_take_away_what_a_registered_breakpoint_declares():
    found = find_breakpoints(["aten::scaled_dot_product_attention"])
    assert found["aten::scaled_dot_product_attention"].capturable


def test_a_python_function_that_dynamo_keeps_whole_can_break():
    torch._dynamo.allow_in_graph(whole)
    (program,) = same_as_eager(lambda x: whole(x + 1) + 1, torch.randn(3), splitting_ops=(whole,))
    assert names(program) == ["piece", target_names(whole)[0], "piece"]


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("probe::tripel", "probe::triple"),
        ("aten::scaled_dot_product_atention", "aten::scaled_dot_product_attention"),
        ("mrv2::atention", "mrv2::attention"),
        ("flex_attention", "higher_order::flex_attention"),
    ],
)
def test_an_operator_that_does_not_exist_is_an_error_with_near_misses(given, near):
    with pytest.raises(ValueError, match="unknown splitting op") as caught:
        find_breakpoints([given])
    assert near in str(caught.value)


@pytest.mark.parametrize("given", [3, None, object()])
def test_what_is_no_operator_at_all_is_an_error_that_says_what_is_wanted(given):
    with pytest.raises(ValueError, match="must be an operator"):
        find_breakpoints([given])
