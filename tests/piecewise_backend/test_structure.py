import math

import pytest
import torch

from piecewise_backend.breakpoints import find_breakpoints
from piecewise_backend.split import split
from piecewise_backend.structure import structure_text
from tests.piecewise_backend.operators import triple


def pieces_of(model, *args, dynamic=()):
    """The structures of the model's pieces, in order."""
    found = []

    def backend(gm, examples):
        graph = split(gm, find_breakpoints(("probe::triple",)))
        found.extend(s.structure for s in graph.segments if s.breakpoint is None)
        return gm.forward

    torch._dynamo.reset()
    for position in dynamic:
        torch._dynamo.mark_dynamic(args[position], 0)
    with torch.no_grad():
        torch.compile(model, backend=backend)(*args)
    return found


def one(model, *args, **kwargs):
    (text,) = pieces_of(model, *args, **kwargs)
    return text


@pytest.mark.parametrize("dynamic", [(), (0,)])
def test_equal_layers_have_equal_text_whatever_their_place_and_weights(dynamic):
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def model(x):
        for layer in layers:
            x = triple(torch.relu(layer(x)) + 1)
        return x

    texts = pieces_of(model, torch.randn(6, 8), dynamic=dynamic)
    assert len(texts) == 4
    assert len(set(texts)) == 1


def test_the_same_model_traced_again_has_the_same_text():
    def model(x):
        return torch.softmax(x * 2, -1) + 1

    assert one(model, torch.randn(6, 8), dynamic=(0,)) == one(model, torch.randn(6, 8), dynamic=(0,))
    assert one(model, torch.randn(6, 8), dynamic=(0,)) == one(model, torch.randn(9, 8), dynamic=(0,))


X = torch.randn(4, 4)


@pytest.mark.parametrize(
    ("this", "that"),
    [
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x * 2, lambda x: x * 2.0),
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (lambda x: x * 1, lambda x: x * True),
        (lambda x: x * math.inf, lambda x: x * math.nan),
        (lambda x: x + 1, lambda x: x.add(1)),
        (lambda x: x[:2] + 1, lambda x: x[2:] + 1),
        (lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True)),
        (lambda x: x.to(torch.float16), lambda x: x.to(torch.bfloat16)),
        (lambda x: x + torch.tensor([1.0, 2, 3, 4]), lambda x: x + torch.tensor([1.0, 2, 3, 5])),
    ],
)
def test_another_constant_operator_or_argument_is_another_text(this, that):
    assert one(this, X) != one(that, X)


@pytest.mark.parametrize(
    "other",
    [X.double(), X.t(), torch.randn(4, 5), torch.randn(8, 4)[::2], torch.randn(20)[4:].view(4, 4), X.bfloat16()],
    ids=["dtype", "strides", "size", "step", "offset", "bf16"],
)
def test_another_dtype_size_stride_or_offset_is_another_text(other):
    def model(x):
        return x * 2

    assert one(model, X) != one(model, other)


def test_inputs_that_share_memory_are_not_inputs_that_do_not():
    def model(x, y):
        x.add_(1)
        return x + y

    base = torch.randn(8)
    assert one(model, base[:4], base[4:]) != one(model, torch.randn(4), torch.randn(8)[4:])


def test_another_range_or_divisibility_of_a_size_is_another_text():
    def plain(x):
        return x * 2

    def at_least_5(x):
        torch._check(x.shape[0] >= 5)
        return x * 2

    def even(x):
        return x * 2 if x.shape[0] % 2 == 0 else x

    texts = {one(model, torch.randn(8, 4), dynamic=(0,)) for model in (plain, at_least_5, even)}
    assert len(texts) == 3


def test_two_sizes_that_are_one_are_not_two_that_differ():
    def model(x, y):
        return x.sum(0) + y.sum(0)

    def equal(x, y):
        return (x + y).sum(0) + y.sum(0)

    args = (torch.randn(8, 4), torch.randn(8, 4))
    assert one(model, *args, dynamic=(0, 1)) != one(equal, *args, dynamic=(0, 1))


def multiply(x):
    return x * 2


def test_a_function_that_a_compiler_may_trace_into_is_known_by_its_identity():
    torch._dynamo.allow_in_graph(multiply)
    assert one(lambda x: multiply(x), X) == one(lambda x: multiply(x), X)
    twin = type(multiply)(multiply.__code__, {"torch": torch}, "multiply")
    twin.__module__, twin.__qualname__ = multiply.__module__, multiply.__qualname__
    torch._dynamo.allow_in_graph(twin)
    assert one(lambda x: multiply(x), X) != one(lambda x: twin(x), X)


def test_an_operator_with_another_schema_is_another_text():
    texts = []
    for schema in ("(Tensor x) -> Tensor", "(Tensor x, int n=1) -> Tensor"):
        with torch.library._scoped_library("probe_schema", "FRAGMENT") as library:
            library.define(f"op{schema}")
            library.impl("op", lambda x, n=1: x + n, "CompositeExplicitAutograd")
            texts.append(one(lambda x: torch.ops.probe_schema.op(x) + 1, X))
    assert texts[0] != texts[1]


def test_a_triton_kernel_is_known_by_its_source_and_constants():
    pytest.importorskip("triton")
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

    def graph_with(kernel, constants):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x.meta["example_value"] = X
        graph.call_function(
            triton_kernel_wrapper_mutation,
            (),
            {
                "kernel_idx": kernel_side_table.add_kernel(kernel),
                "constant_args_idx": kernel_side_table.add_constant_args(constants),
                "grid": [(1, 1, 1)],
                "tma_descriptor_metadata": {},
                "kwargs": {"x": x},
            },
        )
        graph.output(())
        return structure_text(torch.fx.GraphModule(torch.nn.Module(), graph))

    class Kernel:
        def __init__(self, src):
            self.src = self.cache_key = src

    first, again, other = Kernel("a"), Kernel("a"), Kernel("b")
    assert graph_with(first, {"N": 1}) == graph_with(again, {"N": 1})
    assert graph_with(first, {"N": 1}) != graph_with(other, {"N": 1})
    assert graph_with(first, {"N": 1}) != graph_with(first, {"N": 2})
