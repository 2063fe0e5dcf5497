"""Values, writes and shapes at the boundaries between pieces."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from piecewise_backend.breakpoints import find_breakpoints
from piecewise_backend.split import split
from tests.piecewise_backend.operators import (
    COMPILERS,
    DYNAMIC,
    many,
    names,
    pair,
    positive,
    reshape,
    same_as_eager,
    triple,
    write,
)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8)


@DYNAMIC
@COMPILERS
def test_both_results_of_a_breakpoint_reach_pieces_near_and_far(x, dynamic, compiler):
    """R01."""

    def model(x):
        a, b = pair(x)
        near = b + 1
        return triple(near) + a

    (program,) = same_as_eager(model, x, dynamic=dynamic, compiler=compiler)
    assert names(program) == ["probe::pair", "piece", "probe::triple", "piece"]
    position = {slot: i for i, step in enumerate(program.steps) for slot in step.outputs}
    for i, step in enumerate(program.steps):
        assert all(position[slot] < i for slot in step.inputs if slot in position)
    assert len(program.steps[0].outputs) == 2, "each getitem sits with its producer"


@DYNAMIC
@COMPILERS
def test_a_size_taken_before_a_breakpoint_is_used_after_it(x, dynamic, compiler):
    """R02."""

    def model(x):
        y = x + 1
        size = y.shape
        z = triple(y)
        return torch.zeros(size) + triple(z).view(size), z.view(size[0], 2, -1), size[0], z.shape

    (program,) = same_as_eager(model, x, dynamic=dynamic, compiler=compiler)
    for step in program.steps:
        for fake in (*step.input_fakes, *step.output_fakes):
            assert isinstance(fake, torch.Tensor | torch.SymInt), "only tensors and ints cross a boundary"


@DYNAMIC
def test_a_piece_of_views_and_allocations_launches_nothing_and_is_not_compiled(x, dynamic):
    """R03."""

    def model(x):
        y = triple(x)
        out = torch.empty_like(y)
        write(y.view(-1), out.view(-1))
        return out

    (program,) = same_as_eager(model, x, dynamic=dynamic)
    assert names(program) == ["probe::triple", "piece", "probe::write"]
    assert [step.launches for step in program.steps] == [True, False, True]
    assert program.pieces == ()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda x: triple(x) + 1, ["probe::triple", "piece"]),
        (lambda x: triple(x + 1), ["piece", "probe::triple"]),
        (lambda x: triple(x), ["probe::triple"]),
        (lambda x: triple(triple(triple(x))), ["probe::triple"] * 3),
        (lambda x: x + 1, ["piece"]),
    ],
    ids=["first", "last", "only", "consecutive", "none"],
)
@DYNAMIC
def test_no_empty_piece_is_left_before_between_or_after_breakpoints(x, model, expected, dynamic):
    (program,) = same_as_eager(model, x, dynamic=dynamic)
    assert names(program) == expected


@DYNAMIC
@COMPILERS
def test_lists_tuples_and_named_tuples_are_taken_apart_at_boundaries(x, dynamic, compiler):
    def model(x):
        listed = many(x, 3)
        halves = x.split([2, 6], dim=1)
        largest = torch.max(x, dim=1)
        y = triple(listed[1])
        return [y + listed[0], {"k": halves[0] * 2}], torch.cat(halves, 1) + y, largest.values, largest.indices

    same_as_eager(model, x, dynamic=dynamic, compiler=compiler)


@DYNAMIC
def test_a_breakpoint_whose_result_nobody_uses_runs_all_the_same(x, dynamic):
    def model(x):
        out = torch.empty_like(x)
        write(x, out)
        triple(x)
        return x + out

    (program,) = same_as_eager(model, x, dynamic=dynamic)
    assert program.steps[-2].outputs == () or "probe::write" in names(program)


@DYNAMIC
@COMPILERS
def test_keyword_arguments_and_sizes_reach_a_breakpoint(x, dynamic, compiler):
    def model(x):
        return reshape(x=x + 1, size=[x.shape[0] * 2, 4], add=5), reshape(x, size=(x.shape[0], 8))

    same_as_eager(model, x, dynamic=dynamic, compiler=compiler)


@DYNAMIC
@COMPILERS
def test_sizes_none_and_constants_are_outputs_too(x, dynamic, compiler):
    def model(x):
        half = x.shape[0] // 2
        y = triple(x[:half])
        return y + x[half : 2 * half], half, x.shape[0] * 2, None, 3, 1.5, y.new_zeros(half + 1)

    same_as_eager(model, x, dynamic=dynamic, compiler=compiler)


@DYNAMIC
@COMPILERS
def test_writes_keep_their_order_across_boundaries(x, dynamic, compiler):
    def model(x):
        y = x * 1
        view = y.view(-1)
        a = triple(y)
        y.add_(1)
        b = triple(y)
        view.mul_(2)
        c = triple(y)
        x.add_(1)
        x[0] = 7
        return a + b, c, view, y

    same_as_eager(model, x, dynamic=dynamic, compiler=compiler)


@DYNAMIC
@COMPILERS
def test_a_constant_is_there_in_every_part_that_uses_it(x, dynamic, compiler):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            self.scale = torch.arange(8.0)

        def forward(self, x):
            constant = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])
            y = triple(self.linear(x) + constant + self.scale)
            z = triple(y * constant)
            return {"z": z - constant, "list": [y, (z * self.scale,)], "none": None}

    same_as_eager(Model(), x, dynamic=dynamic, compiler=compiler)


def test_flex_attention_is_a_breakpoint(x):
    bias = torch.randn(2)

    def model(x, bias):
        q = x.view(1, 2, -1, 16).repeat(1, 1, 8, 1)
        return flex_attention(q * 2, q, q, score_mod=lambda score, b, h, i, j: score + bias[h]) + 1

    (program,) = same_as_eager(model, x, bias)
    assert "higher_order::flex_attention" in names(program)


@COMPILERS
def test_data_dependent_sizes_cross_boundaries(x, compiler):
    def model(x):
        y = x[x > 0]
        z = triple(y) + y
        w = positive(x - 0.1)
        return z, triple(w + 1)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        same_as_eager(model, x, compiler=compiler)

        def sized(x):
            n = x[0, 0].abs().long().item() + 2
            torch._check(n >= 2)
            torch._check(n < 100)
            return triple(torch.ones(n) + 1) + torch.arange(n), n

        same_as_eager(sized, x, compiler=compiler)


@pytest.mark.parametrize("op", ["aten::softmax", torch.softmax, torch.ops.aten.softmax, torch.ops.aten.softmax.int])
@pytest.mark.parametrize(
    "call", [lambda x: x.softmax(-1), lambda x: torch.softmax(x, -1), lambda x: torch.ops.aten.softmax.int(x, -1)]
)
def test_an_operator_breaks_however_it_is_named_and_called(x, op, call):
    (program,) = same_as_eager(lambda x: call(x + 1) * 2, x, splitting_ops=(op,))
    assert names(program) == ["piece", "aten::softmax", "piece"]


def test_the_graph_that_was_handed_in_is_not_changed(x):
    seen = []

    def model(x):
        size = x.shape
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = triple(x @ x.t())
            z = y @ y
        return z, torch.zeros(size)

    def backend(gm, examples):
        before = [(n.name, n.op, n.target, str(n.args), str(n.kwargs)) for n in gm.graph.nodes]
        split(gm, find_breakpoints(("probe::triple",)))
        after = [(n.name, n.op, n.target, str(n.args), str(n.kwargs)) for n in gm.graph.nodes]
        seen.append(before == after)
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend)(x)
    assert seen == [True]


@COMPILERS
@DYNAMIC
def test_views_of_one_value_enter_a_piece_as_one_input(x, compiler, dynamic):
    def model(x):
        a = x * 2
        flat, rows = a.view(-1), x[1:]
        left, right = a.chunk(2, -1)
        added = a.add_(1)
        y = triple(x)
        flat.add_(1)
        rows.mul_(2)
        left.sub_(right)
        z = triple(y)
        return a + z, flat, added, rows.sum(), right + 1

    (program,) = same_as_eager(model, x, compiler=compiler, dynamic=dynamic)
    tensors = [sum(isinstance(f, torch.Tensor) for f in step.input_fakes) for step in program.steps]
    assert tensors[2] == 2, "a and x"


def test_a_shape_that_changes_in_place_across_a_breakpoint_is_an_error_with_the_line(x):
    def model(x):
        y = x * 2
        y.unsqueeze_(0)
        return triple(y)

    with pytest.raises(Exception, match=r"y\.unsqueeze_\(0\). Use unsqueeze"):
        same_as_eager(model, x)
