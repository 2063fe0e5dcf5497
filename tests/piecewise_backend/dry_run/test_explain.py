"""The dry run: which models capture, and which line keeps the others from it."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import piecewise_backend
from piecewise_backend import Explanation, ReasonCode, explain
from tests.piecewise_backend.dry_run import models

ROWS = torch.randn(8, 16)


def only(found: Explanation, code: ReasonCode):
    (finding,) = [f for f in found.findings if f.code is code]
    return finding


def test_a_model_that_captures_has_no_findings_and_padded_sizes() -> None:
    found = explain(models.Fine(), ROWS)
    assert found.captures_fully
    assert found.verdict.startswith("Fine captures fully")
    (graph,) = found.graphs
    assert graph.name.startswith(str(Path(models.__file__)))
    assert [(size.num_rows, size.bucketed, size.num_graphs) for size in graph.sizes] == [(4, True, 1), (8, True, 1)]
    assert graph.padding.startswith("bucketed")


@pytest.mark.parametrize(
    ("name", "code", "op", "mark"),
    [
        ("ReadsOnHost", ReasonCode.GRAPH_BREAK, "Tensor.item", "item"),
        ("Masks", ReasonCode.GRAPH_BREAK, "aten.nonzero.default", "mask"),
        ("FixedLength", ReasonCode.SIZE_FIXED, "add", "fixed"),
        ("MixesRows", ReasonCode.CROSS_ROW, "mean", "mixes"),
        ("PrintsInLoop", ReasonCode.GRAPH_BREAK, "print", "prints"),
    ],
)
def test_what_breaks_is_named_with_its_operator_and_line(name: str, code: ReasonCode, op: str, mark: str) -> None:
    found = explain(getattr(models, name)(), ROWS)
    finding = only(found, code)
    assert (finding.op, finding.place) == (op, models.line_of(mark))
    assert finding.source.endswith(f"# {mark}")
    assert not found.captures_fully
    assert str(found).splitlines()[0] == found.verdict
    assert f"{op} at {models.line_of(mark)}" in str(found)


@pytest.mark.parametrize(("name", "op"), [("ReadsOnHost", "aten._local_scalar_dense.default"), ("Masks", "nonzero")])
def test_an_operator_that_dynamo_keeps_in_a_piece_is_named_too(name: str, op: str) -> None:
    keep = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    with keep:
        found = explain(getattr(models, name)(), ROWS)
    in_pieces = [f for f in found.findings if f.code is ReasonCode.PIECE_NOT_CAPTURABLE and f.place]
    assert any(op in f.op or "index" in f.op for f in in_pieces)
    assert {f.place for f in in_pieces} <= {models.line_of("item"), models.line_of("mask")}


def test_a_model_of_one_size_is_captured_at_that_size_alone() -> None:
    found = explain(models.FixedLength(), ROWS)
    assert [size.bucketed for size in found.graphs[0].sizes] == [False]
    assert len(found.findings) == 1


def test_a_line_that_fixes_one_of_several_sizes_does_not_break_the_others() -> None:
    found = explain(models.Branches(), ROWS[:6], sizes=[4])
    assert [size.num_rows for size in found.graphs[0].sizes if size.bucketed] == [4]


def test_sizes_are_exact_where_padding_would_change_a_row() -> None:
    for _ in range(2):  # the second time, torch knows from the first call on that sizes vary
        (graph,) = explain(models.MixesRows(), ROWS).graphs
        assert "output 0" in graph.padding
        assert not any(size.bucketed for size in graph.sizes)


def test_only_the_dimension_asked_for_varies() -> None:
    """Torch remembers how sizes varied in earlier calls of the same code, and would let all of them vary."""
    model = nn.GELU()
    for width in (16, 24, 40):
        (graph,) = explain(model, torch.randn(8, width)).graphs
        assert graph.padding.startswith("bucketed")


def test_a_cache_that_the_model_writes_is_captured_and_left_as_it_was() -> None:
    cache = torch.zeros(5, 16)
    found = explain(models.WritesCache(), ROWS, cache)
    assert found.captures_fully
    assert not cache.any()


def test_an_input_is_called_as_the_model_calls_it() -> None:
    finding = only(explain(models.WritesInput(), ROWS), ReasonCode.INPUT_MOVED)
    assert finding.op == "rows"
    zeros = torch.zeros(8, dtype=torch.int64)
    finding = only(explain(models.LooksUp(), zeros), ReasonCode.CROSS_ROW)
    assert "all of it is 0" in finding.why
    assert "{'ids': 'zero'}" in finding.hint


def test_attention_runs_between_graphs_where_rows_are_padded() -> None:
    (graph,) = explain(models.Attends(), ROWS).graphs
    assert graph.breakpoints == ("aten::scaled_dot_product_attention",)
    between = {(size.num_rows, size.bucketed): len(size.between) for size in graph.sizes}
    assert between[8, True] == 1
    assert between[8, False] == 0


def test_mode_full_alone_captures_attention_whole_at_exact_sizes() -> None:
    (graph,) = explain(models.Attends(), ROWS, mode="FULL").graphs
    assert graph.padding == "exact: no call was padded"
    assert not any(size.bucketed or size.between for size in graph.sizes)


def test_the_model_is_left_as_it_was() -> None:
    model = models.Fine().train()
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, args: module.calls.add_(1) and None)
    explain(model, ROWS)
    assert model.training
    assert model.linear.training
    assert model.calls == 0
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_nothing_of_a_dry_run_stays_in_memory() -> None:
    model = models.Fine()
    before = piecewise_backend.reports()  # other tests' may still be in memory
    explain(model, ROWS)
    new = [report for report in piecewise_backend.reports() if not any(report is other for other in before)]
    assert not [report for report in new if report.sizes]
    gone = weakref.ref(model.linear.weight)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_memory_is_that_of_the_largest_size() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x + 1) * 2).relu()  # two values at once at most

    found = explain(Chain(), torch.randn(8, 1000))
    assert found.memory.static_buffers == 8 * 1000 * 4
    assert found.memory.graph_pool == 2 * 8 * 1000 * 4
    assert found.memory.graph_pool_at_most == 3 * (8 + 4) * 1000 * 4


def test_inputs_that_the_model_fails_on_are_refused_with_the_line() -> None:
    with pytest.raises(ValueError, match=r"fails on these inputs before .*: mat1 and mat2 .*models.py:\d+"):
        explain(models.Fine(), torch.randn(8, 7))


def test_facts_are_frozen_and_go_to_json() -> None:
    found = explain(models.ReadsOnHost(), ROWS)
    facts = json.loads(json.dumps(found.to_dict()))
    assert facts["verdict"] == found.verdict
    assert facts["findings"][0]["code"] == "graph_break"
    with pytest.raises(AttributeError):
        found.model = "other"  # type: ignore[misc]
