"""Contenders that are calls of one model on fixed inputs: eager, torch's compilers, and mrv2 in its modes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from piecewise_backend.backend import mrv2, reports
from piecewise_backend.bench.contenders import EMULATED, MODES, Skipped, is_emulated, recorder_for
from piecewise_backend.bench.rounds import calls_per_slot, time_interleaved
from piecewise_backend.dry_run.traces import caller_of
from piecewise_backend.padding import close
from piecewise_backend.reporting.report import Report

Model = Callable[..., Any]

_CALLS_TO_CAPTURE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """What all contenders have in common."""

    device: torch.device
    recorder: str | None = None
    """None: CUDA graphs on a GPU, else none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of mrv2, besides mode and recorder."""
    rounds: int = 15
    warmup: int = 3


class Call:
    """One contender: its own copies of the inputs, at addresses of their own."""

    def __init__(self, name: str, function: Model, inputs: Sequence[Any], *, emulated: bool = False) -> None:
        self.name, self.function, self.emulated = name, function, emulated
        self.inputs = [v.clone() if isinstance(v, torch.Tensor) else v for v in inputs]
        self.reports: list[Report] = []

    def set(self, values: Sequence[Any]) -> None:
        """Copy values into the inputs."""
        for own, value in zip(self.inputs, values, strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(value)

    def run(self) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return self.function(*self.inputs)

    def facts(self) -> dict[str, Any]:
        """What became of mrv2's graphs; nothing for others."""
        if not self.reports:
            return {}
        return {
            "resolved": sorted({report.mode_resolved for report in self.reports}),
            "captures": sum(report.num_captures for report in self.reports),
            "replays": sum(report.num_replays for report in self.reports),
            "runs_without_graphs": sum(report.uncaptured_runs for report in self.reports),
            "reasons": [f"{r.code}: {r} (x{count})" for report in self.reports for r, count in report.reasons],
        }


def make_call(name: str, model: Model, inputs: Sequence[Any], settings: CallSettings) -> Call:
    """The contender `name`: "eager", "inductor", "reduce-overhead" or a mode. Skipped where it cannot run."""
    if name == "eager":
        return Call(name, model, inputs)
    if name == "inductor":
        return Call(name, torch.compile(caller_of(model)), inputs)
    if name == "reduce-overhead":
        if settings.device.type != "cuda":
            raise Skipped(f"no CUDA graphs on {settings.device}, so this would be inductor")
        return Call(name, torch.compile(caller_of(model), mode="reduce-overhead"), inputs)
    assert name in MODES, f"no contender {name!r}"
    recorder = recorder_for(name, settings.device, settings.recorder)
    options = {**settings.options, "mode": name, "recorder": recorder}
    compiled = torch.compile(caller_of(model), backend=mrv2, options=options)
    return Call(f"mrv2 {name}", compiled, inputs, emulated=is_emulated(name, recorder))


@torch.no_grad()
def bench_calls(
    model: Model, inputs: Sequence[Any], names: Sequence[str], settings: CallSettings
) -> dict[str, dict[str, Any]]:
    """The record of each contender: its check, then, for those that are right, times of one run."""
    records: dict[str, dict[str, Any]] = {}
    timed: dict[str, Call] = {}
    with _StateKept(model) as state:
        for name in names:
            label = f"mrv2 {name}" if name in MODES else name
            records[label], call = _checked(name, model, inputs, settings, state)
            if call is not None and records[label]["check"]["passed"] and not call.emulated:
                timed[label] = call
        for label, found in _times(timed, inputs, settings).items():
            records[label] |= found
    return records


def _checked(
    name: str, model: Model, inputs: Sequence[Any], settings: CallSettings, state: _StateKept
) -> tuple[dict[str, Any], Call | None]:
    """(a record, the contender); None for one that cannot run here, or fails."""
    try:
        call = make_call(name, model, inputs, settings)
        record = {"check": check(call, Call("eager", model, inputs), inputs, state), "facts": call.facts()}
    except Skipped as why:
        return {"skipped": str(why)}, None
    except Exception as error:  # the others are measured all the same
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}, None
    return record | ({"emulated": EMULATED} if call.emulated else {}), call


def _times(timed: Mapping[str, Call], inputs: Sequence[Any], settings: CallSettings) -> dict[str, dict[str, Any]]:
    for call in timed.values():
        call.set(inputs)
    runs = {label: call.run for label, call in timed.items()}
    calls = calls_per_slot(runs)
    before = {label: call.facts() for label, call in timed.items()}
    times = time_interleaved(runs, rounds=settings.rounds, warmup=settings.warmup, calls=calls)
    for label, found in times.items():
        found["facts"] = facts = timed[label].facts()
        if facts:
            found["timed_calls_without_graphs"] = facts["runs_without_graphs"] - before[label]["runs_without_graphs"]
    return times


def check(call: Call, reference: Call, inputs: Sequence[Any], state: _StateKept) -> dict[str, Any]:
    """Whether `call` computes what eager does, inputs that are written included: the first values often enough to be
    captured and replayed, then others."""
    known = {id(report) for report in reports()}
    rows = 0
    for shift in (*[0] * _CALLS_TO_CAPTURE, 1, 2):
        values = [_rolled(value, shift) for value in inputs]
        found = []
        for one in (reference, call):
            one.set(values)
            state.restore()
            found.append([v.clone() for v in tree_leaves((one.run(), one.inputs)) if isinstance(v, torch.Tensor)])
        expected, got = found
        rows += 1
        if (why := why_different(got, expected)) is not None:
            return {"passed": False, "why": f"call {rows}: {why}"}
    call.reports = [report for report in reports() if id(report) not in known]
    return {"passed": True, "calls": rows}


def why_different(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str | None:
    """The first result that is not the expected one, within the rounding of its dtype; None where all are."""
    if len(got) != len(expected):
        return f"{len(got)} results, expected {len(expected)}"
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {index} is {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
        if not close(a, b):
            return f"result {index} differs by up to {float((a.double() - b.double()).abs().max()):.3g}"
    return None


def _rolled(value: Any, shift: int) -> Any:
    """Other values of the same kind: the same rows in another order."""
    return value.roll(shift, 0) if isinstance(value, torch.Tensor) and value.dim() else value


class _StateKept:
    """Buffers of a model: contenders share them, so each call starts from the same, and they are given back."""

    def __init__(self, model: Model) -> None:
        buffers = model.buffers() if isinstance(model, nn.Module) else ()
        self._saved = [(buffer, buffer.clone()) for buffer in buffers]

    def restore(self) -> None:
        for buffer, saved in self._saved:
            buffer.copy_(saved)

    def __enter__(self) -> _StateKept:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()
