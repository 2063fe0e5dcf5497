import torch

from piecewise_backend.breakpoints import find_breakpoints
from piecewise_backend.facts import find_facts, find_forbidden
from piecewise_backend.split import split
from tests.piecewise_backend.operators import ALL, triple, write


def facts_of(model, *args, ops=ALL):
    found = []

    def backend(gm, examples):
        graph = split(gm, find_breakpoints(ops))
        found.append((graph, find_facts(gm, graph)))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend)(*args)
    return found[0]


def test_written_inputs_are_found_through_views_and_operators():
    def model(read, added, viewed, out):
        added.add_(1)
        viewed.view(-1)[2:].mul_(2)
        write(read, out)
        return read + added

    graph, facts = facts_of(model, *(torch.randn(4, 4) for _ in range(4)))
    written = {name for name in graph.placeholders if facts.is_written(name)}
    assert {name.strip("_").removeprefix("l_") for name in written} == {"added", "viewed", "out"}


def test_memory_is_followed_through_segments():
    def model(x):
        y = x * 2
        z = triple(y.view(-1))
        return y, y.view(-1), x.view(-1), z, z.view(4, 4)

    graph, facts = facts_of(model, torch.randn(4, 4))
    y, flat, of_input, z, square = (facts.storage[name] for name in graph.outputs)
    assert y == flat != z == square
    assert of_input == facts.storage[graph.placeholders[0]]
    assert len({y, of_input, z}) == 3


def test_an_operator_that_no_graph_records_is_named_with_the_line_that_calls_it():
    def model(x):
        y = triple(x)
        mask = y > 0
        picked = y[mask]
        return triple(picked.sum())

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph, facts = facts_of(model, torch.randn(8))
    forbidden = [find_forbidden(s, f) for s, f in zip(graph.segments, facts.segments, strict=True)]
    assert [f is not None for f in forbidden] == [False, True, False]
    assert "picked = y[mask]" in str(forbidden[1])
    assert "test_facts.py" in str(forbidden[1])


def test_each_of_several_equal_pieces_names_its_own_line():
    def model(x):
        a = triple(x)
        b = a[a > 0].sum() + x  # first
        c = triple(b)
        return c[c > 0].sum() + x  # second

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph, facts = facts_of(model, torch.randn(8))
    lines = [str(find_forbidden(s, f)) for s, f in zip(graph.segments, facts.segments, strict=True) if f.refusal]
    assert ["# first" in lines[0], "# second" in lines[1]] == [True, True]


def test_views_and_allocations_launch_nothing_and_dropout_of_zero_is_not_random():
    def model(x):
        y = triple(x.view(-1))
        z = triple(torch.nn.functional.dropout(y, 0.0) * 2)
        return torch.empty_like(z), z.view(2, -1)

    _, facts = facts_of(model, torch.randn(8))
    assert [f.launches for f in facts.segments] == [False, True, True, True, False]
    assert not facts.is_random
    _, facts = facts_of(lambda x: torch.rand_like(x) + triple(x), torch.randn(8))
    assert facts.is_random


def test_equal_segments_are_looked_at_once(monkeypatch):
    from piecewise_backend import facts as module

    looked = []
    inspect = module._inspect
    monkeypatch.setattr(module, "_inspect", lambda gm: looked.append(gm) or inspect(gm))

    def model(x):
        for _ in range(6):
            x = triple(x) * 2
        return x

    facts_of(model, torch.randn(8))
    assert len(looked) == 2


def test_numbers_inside_a_function_transform_do_not_disturb():
    _, facts = facts_of(lambda x: torch.vmap(torch.vmap(lambda row: row.sin() + 1))(x), torch.randn(2, 3, 4))
    assert [f.launches for f in facts.segments] == [True]


def test_finding_facts_fixes_no_size_of_the_trace() -> None:
    """Operators whose C++ reads sizes as numbers (a linear layer on three dimensions) leave them symbolic."""
    linear, found = torch.nn.Linear(8, 8), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        return y @ y.transpose(1, 2) @ y + torch.nn.functional.layer_norm(y, (8,))

    def backend(gm: torch.fx.GraphModule, example_inputs: object) -> object:
        values = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
        env = next(v for v in values if isinstance(v, torch.SymInt)).node.shape_env
        before = (len(env.guards), dict(env.replacements))
        find_facts(gm, split(gm, find_breakpoints()))
        found.append((before, (len(env.guards), dict(env.replacements))))
        return gm.forward

    x = torch.randn(1, 6, 8)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        torch.compile(forward, backend=backend)(x)
    assert found[0][0] == found[0][1]
