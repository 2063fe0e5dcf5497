"""Graphs are made ready by a thread, and one that cannot be is told of where its size is taken in."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from piecewise_backend.cudagraph.capture import CapturedProgram
from piecewise_backend.cudagraph.emulated import EmulatedRecorder
from piecewise_backend.cudagraph.instantiate import Instantiator
from tests.tiny import TinyDecoder, make_runner, oracle_logits, work


class Graph:
    def __init__(self, log: list[Any], error: Exception | None = None) -> None:
        self.log, self.error = log, error

    def instantiate(self) -> None:
        self.log.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error


@pytest.fixture
def instantiator(monkeypatch: pytest.MonkeyPatch) -> Instantiator:
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    return Instantiator(0)


def test_all_graphs_are_ready_when_the_wait_is_over(instantiator: Instantiator) -> None:
    log: list[Any] = []
    for _ in range(5):
        instantiator.add(Graph(log))  # type: ignore[arg-type]
    instantiator.wait()
    assert log == ["mrv2 graphs"] * 5
    instantiator.add(Graph(log))  # type: ignore[arg-type]
    instantiator.close()
    assert len(log) == 6


def test_the_first_error_is_raised_once_and_the_other_graphs_are_made_ready(instantiator: Instantiator) -> None:
    log: list[Any] = []
    for error in (None, MemoryError("first"), ValueError("second"), None):
        instantiator.add(Graph(log, error))  # type: ignore[arg-type]
    with pytest.raises(MemoryError, match="first"):
        instantiator.wait()
    instantiator.wait()
    assert len(log) == 4
    instantiator.close()


def test_a_device_that_is_not_there_is_an_error_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise RuntimeError(f"no device {index}")

    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    instantiator = Instantiator(7)
    with pytest.raises(RuntimeError, match="no device 7"):
        instantiator.wait()
    instantiator.close()


def test_a_size_whose_graphs_the_driver_refuses_is_dropped_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known only when the next size has warmed up."""
    measure = CapturedProgram.size_report

    def refuse(captured: CapturedProgram, descriptor: str, num_tokens: int, kind: str) -> Any:
        if num_tokens == 4:
            raise torch.OutOfMemoryError("no memory for the graph")
        return measure(captured, descriptor, num_tokens, kind)

    monkeypatch.setattr(CapturedProgram, "size_report", refuse)
    model = TinyDecoder()
    runner = make_runner("PIECEWISE", model=model, capture_sizes=[2, 4, 8])
    assert sorted(d.num_tokens for d in runner.manager.captured) == [2, 8]
    assert [size.num_tokens for size in runner.report.sizes] == [8, 2]
    (reason,) = [r for r, _ in runner.report.reasons if "no memory for the graph" in r.detail]
    assert reason.code == "out_of_memory"
    assert "4" in reason.subject
    logits = runner.execute([work("a", [1, 2, 3], 0, [0])])
    torch.testing.assert_close(logits, oracle_logits(model, [1, 2, 3])[-1:])


def test_a_size_is_measured_after_the_next_one_has_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its graphs can be made ready meanwhile."""
    order: list[str] = []
    measure = EmulatedRecorder.memory_bytes
    monkeypatch.setattr(EmulatedRecorder, "memory_bytes", lambda self: order.append("measured") or measure(self))
    begin = EmulatedRecorder.begin
    monkeypatch.setattr(EmulatedRecorder, "begin", lambda self: order.append("begun") or begin(self))
    from piecewise_backend.program import Program

    warm_up = Program.warm_up
    monkeypatch.setattr(Program, "warm_up", lambda *given: order.append("warm") or warm_up(*given))
    make_runner("FULL", capture_sizes=[4, 8], max_num_reqs=1)
    first, second = [i for i, what in enumerate(order) if what == "begun"][:2]
    assert order[first:second] == ["begun", "warm", "measured", "measured"]
