import gc
import weakref

import pytest
import torch

import piecewise_backend
from piecewise_backend import reset
from piecewise_backend.backend import mrv2
from tests.tiny import make_runner

OPTIONS = {"recorder": "emulated", "compiler": "eager", "cache": False}


def compiled(function, **kwargs):
    return torch.compile(function, backend="mrv2", options=OPTIONS, **kwargs)


def call(function, *args):
    with torch.no_grad():
        return function(*args)


def test_a_compiled_function_has_the_report_of_its_own_graph():
    one, other = compiled(lambda x: x + 1), compiled(lambda x: x * 2)
    call(one, torch.ones(3))
    call(other, torch.ones(3))
    for function, operator in ((one, "add"), (other, "mul")):
        (piece,) = piecewise_backend.report(function).structures.values()
        assert piece.launches == ((operator, 1),)


class Doubler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * 2 * self.weight


@pytest.mark.parametrize("make", [Doubler, lambda: torch.nn.Linear(3, 3)])
def test_two_modules_of_one_class_are_told_apart(make):
    one, other = compiled(make()), compiled(make())
    call(one, torch.ones(3))
    assert piecewise_backend.report(one).num_pieces == 1
    with pytest.raises(RuntimeError, match="compiles at the first call, so call it once"):
        piecewise_backend.report(other)


def test_a_module_that_was_compiled_in_place_has_a_report():
    module = Doubler()
    module.compile(backend="mrv2", options=OPTIONS)
    call(module, torch.ones(2, 3))
    assert piecewise_backend.report(module).num_pieces == 1


def test_what_dynamo_takes_from_an_earlier_compile_of_the_same_function_is_found():
    def function(x):
        return x - 1

    one, other = compiled(function), compiled(function)
    call(one, torch.ones(3))
    call(other, torch.ones(3))
    assert piecewise_backend.report(other) is piecewise_backend.report(one)


def test_the_newest_graph_of_several_is_given_and_has_the_others():
    def function(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y.sin()

    function = compiled(function)
    call(function, torch.ones(3))
    report = piecewise_backend.report(function)
    operators = [next(iter(r.structures.values())).launches[0][0] for r in (*report.others, report)]
    assert operators == ["add", "sin"]
    assert report.to_dict()["others"][0]["num_replays"] == 0
    assert "1 more graph(s) of this function" in str(report)


def test_a_backend_of_the_users_own_that_calls_ours_has_a_report():
    function = torch.compile(lambda x: x + 1, backend=lambda gm, inputs: mrv2(gm, inputs, options=OPTIONS))
    call(function, torch.ones(3))
    assert piecewise_backend.report(function).num_pieces == 1


def test_a_runner_and_the_function_of_the_backend_have_the_reports_they_carry():
    runner = make_runner()
    assert piecewise_backend.report(runner) is runner.report
    made = []

    def backend(gm, inputs):
        made.append(mrv2(gm, inputs, options=OPTIONS))
        return made[-1]

    call(torch.compile(lambda x: x + 1, backend=backend), torch.ones(3))
    assert piecewise_backend.report(made[0]) is made[0].report


@pytest.mark.parametrize("value", [7, "model", torch.nn.Linear(2, 2), lambda x: x, None])
def test_anything_else_is_refused_with_what_is_allowed(value):
    with pytest.raises(TypeError, match=r"has no report; allowed: what torch\.compile"):
        piecewise_backend.report(value)


def test_after_a_reset_nothing_is_compiled():
    function = compiled(lambda x: x + 1)
    call(function, torch.ones(3))
    reset()
    with pytest.raises(RuntimeError, match="compiled nothing for this"):
        piecewise_backend.report(function)


def test_a_report_keeps_no_model_alive():
    module = torch.nn.Linear(3, 3)
    weight = weakref.ref(module.weight)
    function = compiled(module)
    call(function, torch.ones(2, 3))
    report = piecewise_backend.report(function)
    report.to_dict()
    del module, function
    reset()
    gc.collect()
    assert weight() is None
    assert "mrv2 report" in str(report)
