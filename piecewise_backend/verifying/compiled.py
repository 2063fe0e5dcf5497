"""Compiled pieces against the same pieces as traced, on the same inputs: no error adds up from piece to piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piecewise_backend.cudagraph.capture import Step
from piecewise_backend.program import Traced
from piecewise_backend.verifying.blame import producer, random_line
from piecewise_backend.verifying.result import Fault
from piecewise_backend.verifying.trials import Masks, Trials
from piecewise_backend.verifying.walks import copied, traced_of, written_by


def check_compiled(trials: Trials, masks: Masks) -> None:
    """Add the first compiled piece that differs from what it was traced as."""
    slots = trials.program.fill(trials.case.args)
    with trials.fresh():
        for index, step in enumerate(trials.program.steps):
            values = [slots[i] for i in step.inputs]
            traced = traced_of(trials.program, index)
            if traced is None or traced.compiled is None or traced.compiled.source == "eager":
                results = step.run(*values)
            elif traced.facts.is_random:
                line = random_line(traced)
                trials.notes.append(f"{step.name} as compiled: it draws random numbers{line}, others than eager does")
                results = step.run(*values)
            else:
                results = _compare_piece(trials, index, step, traced, values, masks[index])
            for slot, value in zip(step.outputs, results, strict=True):
                slots[slot] = value
            for slot in step.frees:
                slots[slot] = None


def _compare_piece(
    trials: Trials, index: int, step: Step, traced: Traced, values: list[Any], masks: Sequence[torch.Tensor | None]
) -> Sequence[Any]:
    """Run a piece as traced and compiled, on the same values."""
    trials.compiled += 1
    written = [(step.inputs[i], values[i]) for i in written_by(trials.program, index)]
    before = [copied(value) for _, value in written]
    expected = [*map(copied, traced.segment.module(*values)), *trials.seen(written)]
    for (_, value), saved in zip(written, before, strict=True):
        value.copy_(saved)
    results = step.run(*values)
    actual = [*results, *trials.seen(written)]
    fakes = trials.fakes_after(index, len(written))
    for position, (one, other) in enumerate(zip(expected, actual, strict=True)):
        is_known = position < len(results) or len(masks) == len(actual)  # not of large inputs
        off = trials.distance(one, other, fakes[position], masks[position] if is_known else None)
        if off is not None and not trials.found:
            trials.add(Fault.COMPILER, step.name, producer(traced, position), off)
    return results
