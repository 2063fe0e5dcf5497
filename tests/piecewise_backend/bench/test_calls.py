"""Timing calls: outputs are checked first, and what is not a speed is not given as one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piecewise_backend.bench import calls as lib
from piecewise_backend.bench import plot
from piecewise_backend.bench.calls import Call, CallSettings, bench_calls, why_different
from piecewise_backend.bench.contenders import all_right
from piecewise_backend.bench.record import write
from piecewise_backend.bench.results import add_ratios, cell, markdown, notes
from piecewise_backend.bench.rounds import time_interleaved

CPU = torch.device("cpu")
ROWS = torch.randn(6, 16)


def settings(recorder: str | None = None) -> CallSettings:
    options = {"compiler": "eager", "cache": False}
    return CallSettings(device=CPU, recorder=recorder, options=options, rounds=3, warmup=1)


class Counts(nn.Module):
    """Its output depends on how often it was called, and it writes to its second input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        total.add_(x.sum())
        return self.linear(x) + self.calls


def test_right_contenders_have_a_time_a_spread_and_a_ratio_to_eager() -> None:
    cases = {"call": bench_calls(nn.Linear(16, 16), [ROWS], ["eager", "NONE"], settings())}
    add_ratios(cases)
    assert list(cases["call"]) == ["eager", "mrv2 NONE"]
    assert all_right(cases["call"])
    eager, none = cases["call"].values()
    assert eager["speed_up_over_eager"] == 1
    assert none["speed_up_over_eager"] == eager["median_ms"] / none["median_ms"]
    assert none["p10_ms"] <= none["median_ms"] <= none["p90_ms"]
    assert len(none["rounds_ms"]) == 3
    assert none["facts"]["resolved"] == ["NONE"]
    assert "×" in cell(none, "eager")


def test_emulated_graphs_are_checked_and_get_no_time() -> None:
    cases = {"call": bench_calls(nn.Linear(16, 16), [ROWS], ["eager", "FULL"], settings("emulated"))}
    add_ratios(cases)
    full = cases["call"]["mrv2 FULL"]
    assert full["check"]["passed"]
    assert full["facts"]["replays"] > 0
    assert not any("ms" in key or "speed" in key for key in full)
    assert cell(full, "eager") == "right, not timed"
    assert "say nothing about speed" in notes({"cases": cases})[0]


def test_what_would_be_another_contender_under_a_false_name_is_skipped() -> None:
    found = bench_calls(nn.Linear(16, 16), [ROWS], ["reduce-overhead", "FULL"], settings())
    assert "would be inductor" in found["reduce-overhead"]["skipped"]
    assert "would be NONE" in found["mrv2 FULL"]["skipped"]
    assert all_right(found)


def test_a_wrong_contender_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lib.make_call

    def wrong(name: str, *args: Any) -> Call:
        call = right(name, *args)
        if name == "NONE":
            function = call.function
            call.function = lambda *inputs: function(*inputs) + 1e-2
        return call

    monkeypatch.setattr(lib, "make_call", wrong)
    cases = {"call": bench_calls(nn.Linear(16, 16), [ROWS], ["eager", "NONE"], settings())}
    add_ratios(cases)
    none = cases["call"]["mrv2 NONE"]
    assert none.keys() == {"check", "facts"}
    assert "differs by up to 0.01" in none["check"]["why"]
    assert not all_right(cases["call"])
    assert cell(none, "eager") == "WRONG"
    assert "median_ms" in cases["call"]["eager"]


def test_a_contender_that_is_wrong_only_once_it_replays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that keeps the values of its first calls is right as long as those come."""
    right = lib.make_call

    def stale(name: str, *args: Any) -> Call:
        call = right(name, *args)
        first = call.function(*call.inputs).clone()
        call.function = lambda *inputs: first
        return call

    monkeypatch.setattr(lib, "make_call", stale)
    assert not bench_calls(nn.Linear(16, 16), [ROWS], ["NONE"], settings())["mrv2 NONE"]["check"]["passed"]


def test_a_contender_that_fails_is_recorded_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lib.make_call
    monkeypatch.setattr(lib, "make_call", lambda name, *args: 1 / 0 if name == "NONE" else right(name, *args))
    found = bench_calls(nn.Linear(16, 16), [ROWS], ["eager", "NONE"], settings())
    assert "ZeroDivisionError" in found["mrv2 NONE"]["error"]
    assert "median_ms" in found["eager"]
    assert not all_right(found)


def test_buffers_and_written_inputs_are_the_same_for_every_contender_and_are_left_alone() -> None:
    model, total = Counts(), torch.zeros(())
    found = bench_calls(model, [ROWS, total], ["eager", "NONE", "FULL"], settings("emulated"))
    assert all(record["check"]["passed"] for record in found.values())
    assert model.calls == total == 0


def test_results_are_compared_with_shape_dtype_and_rounding() -> None:
    expected = [torch.randn(3, 4), torch.arange(3)]
    assert why_different([expected[0] * (1 + 1e-6), expected[1]], expected) is None
    assert "differs by up to" in str(why_different([expected[0] + 1e-2, expected[1]], expected))
    assert "differs by up to 1" in str(why_different([expected[0], expected[1] + 1], expected))
    assert "expected torch.float32 (3, 4)" in str(why_different([expected[0][:2], expected[1]], expected))
    assert "1 results, expected 2" in str(why_different(expected[:1], expected))


def test_rounds_go_through_all_contenders_forwards_and_backwards() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    found = time_interleaved(runs, rounds=2, warmup=1, calls=1)
    assert "".join(order) == "abccbaabc"
    assert {len(times["rounds_ms"]) for times in found.values()} == {2}


def test_a_record_has_its_conditions_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cases = {"call": bench_calls(nn.Linear(16, 16), [ROWS], ["eager", "NONE"], settings())}
    results = {"target": "a linear layer", "unit": "call", "base": "eager", "device": "CPU", "cases": cases}
    path = write("bench_linear", results, tmp_path)
    conditions = json.loads(path.read_text())["conditions"]
    assert conditions.keys() >= {"command", "date", "gpu", "cpu", "versions", "commit"}
    assert "| mrv2 NONE |" in markdown(results)
    assert plot.draw(results, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_nothing_is_drawn_where_nothing_was_timed_or_matplotlib_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = {"cases": {"call": {"eager": {"skipped": "why"}}}}
    assert not plot.draw(results, tmp_path / "none.png")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert "matplotlib is not installed" in str(plot.why_no_plot())
