"""The graphs that Dynamo hands to the backend while a model is called at several sizes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from piecewise_backend.backend import mrv2
from piecewise_backend.config import Options
from piecewise_backend.program import Program
from piecewise_backend.reporting.report import Report


@dataclass(frozen=True, slots=True)
class Traced:
    """One graph that Dynamo handed to the backend."""

    name: str
    gm: fx.GraphModule
    program: Program
    report: Report
    caller: Any
    count: int
    """Rows of the call that it was traced for."""
    calls: dict[int, tuple[Any, ...]]
    """Arguments of the last call by its rows."""


@dataclass(slots=True)
class KeepingBackend:
    """Compiles as mrv2 does and keeps what comes of it. Code that torch keeps refers to this object alone, so
    `forget` gives all memory back."""

    options: Options
    traced: list[Traced] = field(default_factory=list)
    functions: dict[int, Callable[..., Any]] = field(default_factory=dict)
    count: int = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        given = {f.name: getattr(self.options, f.name) for f in dataclasses.fields(Options)}
        function: Any = mrv2(gm, example_inputs, options=given)
        number, calls = len(self.traced), dict[int, tuple[Any, ...]]()
        report = function.report
        self.traced.append(Traced(_first_line(gm), gm, function.program, report, function.caller, self.count, calls))
        self.functions[number] = function
        return lambda *args: self._call(number, args)

    def _call(self, number: int, args: tuple[Any, ...]) -> Any:
        self.traced[number].calls[self.count] = args
        return self.functions[number](*args)

    def forget(self) -> None:
        self.traced.clear()
        self.functions.clear()


def caller_of(model: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `model`, with a code object of its own: torch keeps what it compiled by code object."""

    def call(*args: Any) -> Any:
        return model(*args)

    return types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)


def _first_line(gm: fx.GraphModule) -> str:
    """ "file:line, in function" of the user's outermost line."""
    for node in gm.graph.nodes:
        for line in node.meta.get("stack_trace", "").splitlines():
            if line.strip().startswith("File ") and __file__ not in line:
                return line.strip().removeprefix("File ").replace('"', "").replace(", line ", ":")
    return "of modules that are torch's own"


def is_retraced_each_size(traced: Sequence[Traced], counts: Sequence[int]) -> bool:
    """Whether some graph was traced for every size, and never for all of them."""
    distinct = len(set(counts) - {1})
    return distinct > 2 and any(
        len({t.count for t in found}) >= distinct and not any(t.program.token_dim for t in found)
        for found in _by_name(traced).values()
    )


def latest(traced: Sequence[Traced]) -> list[Traced]:
    """Of each graph the trace that serves all sizes, else the last; and that of one row, which torch keeps apart."""
    kept: list[Traced] = []
    for found in _by_name(traced).values():
        dynamic = [t for t in found if t.program.token_dim]
        kept.append((dynamic or found)[-1])
        kept += [t for t in found if t.count == 1 and t not in kept][-1:]
    return kept


def _by_name(traced: Sequence[Traced]) -> dict[str, list[Traced]]:
    found: dict[str, list[Traced]] = {}
    for one in traced:
        found.setdefault(one.name, []).append(one)
    return found
