"""Programs that show what each step computes, and programs that run as traced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piecewise_backend.cudagraph.capture import Step
from piecewise_backend.program import Program, Traced

_LARGEST_COPY = 64 << 20
"""Bytes of an input up to which what a step writes to it is looked at after that step, not only at the end."""

Visible = Callable[[int, torch.Tensor], torch.Tensor]
"""(slot, value of an input) to the part of it that counts."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A program whose further outputs are copies of what each step left behind."""

    program: Program
    steps: tuple[tuple[int, int], ...]
    """For each step of the original, where its copies are among the outputs: (first, end)."""


def traced_of(program: Program, index: int) -> Traced | None:
    """What step `index` was traced as; None for a step that was added later."""
    return program.traced[index] if index < len(program.traced) else None


def written_by(program: Program, index: int) -> tuple[int, ...]:
    """Which of a step's inputs it writes to."""
    traced = traced_of(program, index)
    return () if traced is None else traced.facts.written


def as_traced(program: Program) -> Program:
    """The same program without a compiler: each step runs the graph that was traced."""
    steps = list(program.steps)
    for index, traced in enumerate(program.traced):
        steps[index] = dataclasses.replace(steps[index], run=traced.segment.module.forward, opaque=False)
    return dataclasses.replace(program, steps=tuple(steps))


def watched(program: Program, args: Sequence[Any], visible: Visible) -> Watched:
    """`program`, with a step after each one that copies its results and the inputs that it writes to."""
    steps: list[Step] = []
    places: list[tuple[int, int]] = []
    slot, first = program.num_slots, len(program.outputs)
    for index, step in enumerate(program.steps):
        written = [step.inputs[i] for i in written_by(program, index)]
        shown = [*step.outputs, *(s for s in written if s >= len(args) or _is_small(args[s]))]
        steps.append(dataclasses.replace(step, frees=()))
        copies = tuple(range(slot, slot + len(shown)))
        steps.append(_copying_step(step, shown, copies, len(args), visible))
        places.append((first, first + len(shown)))
        slot, first = slot + len(shown), first + len(shown)
    outputs = (*program.outputs, *range(program.num_slots, slot))
    changed = dataclasses.replace(program, steps=tuple(steps), outputs=outputs, num_slots=slot, traced=())
    return Watched(changed, tuple(places))


def _is_small(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.numel() * value.dtype.itemsize <= _LARGEST_COPY


def _copying_step(step: Step, shown: list[int], copies: tuple[int, ...], num_inputs: int, visible: Visible) -> Step:
    def copy(*values: Any) -> tuple[Any, ...]:
        given = zip(shown, values, strict=True)
        return tuple(copied(visible(s, v) if s < num_inputs else v) for s, v in given)

    return Step(
        name=f"copies of {step.name}",
        run=copy,
        inputs=tuple(shown),
        outputs=copies,
        frees=step.frees,
        opaque=False,
        launches=True,
        breakpoint=None,
        forbidden=None,
    )


def copied(value: Any) -> Any:
    """A copy of a tensor's values; anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class FilledAllocations(TorchDispatchMode):
    """Memory that was allocated and not written holds `fill`: what differs between two fills is undefined."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _allocations() and isinstance(result, torch.Tensor) and result.numel():
            is_float = result.dtype.is_floating_point or result.dtype.is_complex
            result.fill_(self.fill if is_float else int(self.fill == self.fill))
        return result


@functools.cache
def _allocations() -> frozenset[Any]:
    names = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
    return frozenset(getattr(torch.ops.aten, name) for name in names)
