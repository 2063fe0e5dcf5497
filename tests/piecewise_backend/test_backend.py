import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from piecewise_backend.backend import mrv2, reports, reset
from tests.piecewise_backend.operators import triple

OPTIONS = {"compiler": "eager", "splitting_ops": ("probe::triple",)}


def model(x):
    return triple(x + 1) * 2


def compiled_with(**options):
    return torch.compile(model, backend=mrv2, options=OPTIONS | options)


X = torch.ones(3)


def test_it_is_a_plain_function_with_its_program_and_report():
    found = []

    def backend(gm, examples):
        found.append(mrv2(gm, examples, options=OPTIONS))
        return found[0]

    torch.compile(model, backend=backend)(X)
    (function,) = found
    assert function.__code__.co_name == "mrv2_compiled"
    assert function.program.num_pieces == function.report.num_pieces == 2
    assert function.report.name.endswith("in model")
    assert any(report is function.report for report in reports())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes_of_torch_compile_are_accepted_as_modes(mode):
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(torch.relu, backend=mrv2, mode=mode)(X), X)


def test_a_mode_that_does_not_exist_is_an_error_for_the_caller():
    with pytest.raises(Exception, match="reduce-overhead"):
        torch.compile(model, backend=mrv2, options=OPTIONS | {"mode": "reduce-overheat"})(X)


def test_an_option_that_does_not_exist_is_an_error_for_the_caller():
    with pytest.raises(Exception, match="did you mean 'compiler'"):
        compiled_with(compilr="eager")(X)


def test_a_guard_filter_among_the_options_is_left_to_torch():
    seen = []

    def keep_all(guards):
        seen.append(len(guards))
        return [True] * len(guards)

    torch.testing.assert_close(compiled_with(guard_filter_fn=keep_all)(X), model(X))
    assert seen


class TestGrad:
    linear = torch.nn.Linear(3, 3)

    def call(self, fn, grad):
        with torch.set_grad_enabled(grad):
            return torch.compile(fn, backend=mrv2, options=OPTIONS)(X)

    def test_a_model_called_with_grad_is_an_error_with_the_way_out(self):
        with pytest.raises(Exception, match=r"inference only.*torch\.no_grad\(\).*requires_grad_\(False\)"):
            self.call(lambda x: triple(self.linear(x)), grad=True)

    def test_a_model_that_switches_grad_on_is_an_error_that_says_so(self):
        def forward(x):
            with torch.enable_grad():
                return triple(self.linear(x))

        with pytest.raises(Exception, match=r"take torch\.enable_grad\(\) out of it"):
            self.call(forward, grad=False)

    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.parametrize("way", [torch.no_grad, torch.inference_mode])
    def test_without_grad_it_runs_wherever_grad_was_switched_off(self, grad, way):
        def forward(x):
            with way():
                return triple(self.linear(x))

        result = self.call(forward, grad)
        assert not result.requires_grad
        torch.testing.assert_close(result, forward(X))

    def test_results_that_carry_no_gradient_and_returned_parameters_are_no_error(self):
        classes, weight = self.call(lambda x: (self.linear(x).argmax(-1), self.linear.weight), grad=True)
        assert weight is self.linear.weight
        assert classes == self.linear(X).argmax(-1)

    def test_nothing_is_kept_for_a_backward_pass(self):
        result = self.call(lambda x: triple(self.linear(x).detach() * self.linear.weight.detach()), grad=True)
        assert result.grad_fn is None


def test_programs_do_not_outlive_a_reset_of_dynamo():
    reset()  # what earlier tests compiled may still be alive
    alive = []
    for _ in range(3):
        torch._dynamo.reset()

        def backend(gm, examples):
            function = mrv2(gm, examples, options=OPTIONS | {"recorder": "emulated"})
            alive.append(weakref.ref(function))
            alive.append(weakref.ref(function.caller))
            return function

        compiled = torch.compile(model, backend=backend)
        with torch.no_grad():
            for _ in range(3):
                compiled(X)
        del compiled, backend
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in alive] == [None] * 6
    assert reports() == []


def test_reset_forgets_reports_and_compiled_pieces():
    from piecewise_backend import compile as module

    with torch.no_grad():
        compiled_with()(X)
    assert reports()
    assert module._in_process
    reset()
    assert reports() == []
    assert not module._in_process


def test_a_recorder_that_this_device_lacks_is_an_error_and_auto_a_reason():
    with pytest.raises(Exception, match="needs tensors on a CUDA device"):
        compiled_with(recorder="cuda")(X)
    torch._dynamo.reset()
    reset()
    compiled = compiled_with()
    with torch.no_grad():
        compiled(X)
    (report,) = reports()
    assert [reason.code.value for reason, _ in report.reasons] == ["no_recorder"]


def test_torch_finds_the_backend_by_name_without_an_import():
    code = "import torch; print('mrv2' in torch._dynamo.list_backends())"
    if "mrv2" not in torch._dynamo.list_backends():
        pytest.skip("the package is not installed here")
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "True"
