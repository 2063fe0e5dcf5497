"""Plain callers for the tests: a compiled function whose report, caller and program can be looked at."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecewise_backend.backend import mrv2
from piecewise_backend.plain import PlainCaller
from piecewise_backend.program import Program
from piecewise_backend.reasons import ReasonCode
from piecewise_backend.reporting.report import Report


class Compiled:
    """`function` through mrv2 with the emulated recorder, called under no_grad; dimension 0 varies."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.made: list[Any] = []
        self.options = {"recorder": "emulated", "compiler": "eager", "capture_after": 1, "cache": False} | options
        self.call = torch.compile(function, backend=self._backend)

    def _backend(self, gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        self.made.append(mrv2(gm, examples, options=self.options))
        return self.made[-1]

    def __call__(self, *args: Any, dynamic: Sequence[int] = (0,)) -> Any:
        for position in dynamic:
            torch._dynamo.mark_dynamic(args[position], 0)
        with torch.no_grad():
            return self.call(*args)

    @property
    def report(self) -> Report:
        return self.made[-1].report

    @property
    def program(self) -> Program:
        return self.made[-1].program

    @property
    def caller(self) -> PlainCaller:
        return self.made[-1].caller

    @property
    def codes(self) -> set[ReasonCode]:
        return {code for made in self.made for code in made.report.reasons.codes()}

    def detail(self, code: ReasonCode) -> str:
        """The text of the first reason of this code."""
        return next(str(reason) for made in self.made for reason, _ in made.report.reasons if reason.code is code)
