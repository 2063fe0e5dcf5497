import pytest
import torch

from piecewise_backend.backend import mrv2
from tests.piecewise_backend.operators import same_as_eager, triple

OPTIONS = {"compiler": "eager", "splitting_ops": ("probe::triple",)}


class AddsBuffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("buf", torch.randn(16, 8))

    def forward(self, x):
        y = triple(x)
        return y + self.buf


def marked(*size):
    x = torch.randn(*size)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def test_the_line_that_fixes_a_dynamic_dimension_is_named():
    """R08."""
    compiled = torch.compile(AddsBuffer(), backend=mrv2, options=OPTIONS)
    with torch.no_grad(), pytest.raises(Exception, match="dimension 0 of input 'l_x_' is marked dynamic") as caught:
        compiled(marked(16, 8))
    message = str(caught.value)
    assert "return y + self.buf" in message
    assert "test_dynamic.py:" in message
    assert "fixes it at 16" in message


def test_a_branch_on_the_exact_size_fixes_it_too():
    def model(x):
        if x.shape[0] == 16:
            return triple(x)
        return x

    compiled = torch.compile(model, backend=mrv2, options=OPTIONS)
    with torch.no_grad(), pytest.raises(Exception, match=r"if x\.shape\[0\] == 16"):
        compiled(marked(16, 8))


def test_a_dimension_that_stays_dynamic_or_was_not_marked_is_no_error():
    same_as_eager(lambda x, y: triple(x) + y, torch.randn(16, 8), torch.randn(16, 8), dynamic=(0, 1))
    same_as_eager(AddsBuffer(), torch.randn(16, 8))
    x = torch.randn(16, 8)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    with torch.no_grad():
        torch.compile(AddsBuffer(), backend=mrv2, options=OPTIONS)(x)


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_float_that_changes_is_a_constant_of_each_trace(dynamic):
    traces = []

    def backend(gm, examples):
        compiled = mrv2(gm, examples, options=OPTIONS)
        traces.append(compiled)
        return compiled

    def model(x, f):
        return triple(x * f) + f, f * 2

    compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)
    x = torch.randn(4, 8)
    with torch.no_grad():
        for f in (2.5, 3.5, 4.5, 2.5, 3.5):
            torch.testing.assert_close(compiled(x, f), model(x, f))
    assert len(traces) == 3
