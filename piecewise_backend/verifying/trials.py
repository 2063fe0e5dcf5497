"""Running one case again and again: the same inputs and memory each time, and what is found on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from piecewise_backend.padding import SavedState
from piecewise_backend.verifying.blame import Place
from piecewise_backend.verifying.case import Case
from piecewise_backend.verifying.compare import Distance, differs, distance
from piecewise_backend.verifying.result import Difference, Fault
from piecewise_backend.verifying.walks import FilledAllocations, as_traced, copied, watched

Masks = list[list[torch.Tensor | None]]
"""Step by step, for each value that it leaves behind: which elements nothing wrote."""


class Trials:
    """The state of one check."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.program = case.program
        self.saved = SavedState(case.program, case.args)
        self.found: list[Difference] = []
        self.notes: list[str] = []
        self.compiled = 0
        self.replayed = False

    def undefined(self) -> Masks:
        """What nothing writes: memory that is allocated with other contents makes it differ."""
        one, other = (self._run_as_traced(fill) for fill in (0.0, math.nan))
        return [[differs(a, b) for a, b in zip(*values, strict=True)] for values in zip(one, other, strict=True)]

    def _run_as_traced(self, fill: float) -> list[list[Any]]:
        watching = watched(as_traced(self.program), self.case.args, self.case.visible)
        with self.fresh(), FilledAllocations(fill):
            outputs = watching.program.run(self.case.args)
        return [list(outputs[first:end]) for first, end in watching.steps]

    def fresh(self) -> Any:
        """State and random numbers as at the beginning; the inputs are in place within what is returned."""
        self.saved.restore()
        torch.manual_seed(0)
        return self.case.fill()

    def seen(self, written: Sequence[tuple[int, Any]]) -> list[Any]:
        """Copies of (slot, value) pairs, of inputs only what counts."""
        visible, num_inputs = self.case.visible, len(self.case.args)
        return [copied(visible(slot, value) if slot < num_inputs else value) for slot, value in written]

    def distance(self, one: Any, other: Any, fake: Any, undefined: torch.Tensor | None) -> Distance | None:
        """Of the real rows of two values; `fake` is the traced one, `undefined` what to leave out."""
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
            if undefined is not None and undefined.shape == one.shape:
                undefined = self.case.rows(undefined, fake)
            else:
                undefined = None
            one, other = self.case.rows(one, fake), self.case.rows(other, fake)
        return distance(one, other, undefined)

    def fakes_after(self, index: int, count: int) -> list[Any]:
        """Traced values of what step `index` leaves behind: its results, and `count` inputs that it writes to."""
        fakes = list(self.program.steps[index].output_fakes)
        return [*fakes, *[None] * count]

    def add(self, fault: Fault, step: str, place: Place, off: Distance | None, detail: str = "") -> None:
        off = off or Distance(0.0, 0.0, 0.0)
        self.found.append(
            Difference(
                size=self.case.size,
                fault=fault,
                step=step,
                op=place[0],
                line=place[1],
                max_abs=off.max_abs,
                max_rel=off.max_rel,
                tolerance=off.allowed,
                detail="; ".join(filter(None, (off.detail, detail))),
            )
        )
