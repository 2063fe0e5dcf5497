"""Replays against the same steps without graphs.

A replay that is wrong is recorded anew with a copy after each step, so that the first wrong step shows. Where the new
recording is right, the old one is stale: something that it holds has changed since it was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from piecewise_backend.cudagraph.capture import Step
from piecewise_backend.program import Program, Traced
from piecewise_backend.verifying.blame import Place, first_wrong_when_replayed, producer, random_line, suspects
from piecewise_backend.verifying.compare import Distance, distance
from piecewise_backend.verifying.result import Fault
from piecewise_backend.verifying.trials import Masks, Trials
from piecewise_backend.verifying.walks import copied, traced_of, watched


def check_replay(trials: Trials, masks: Masks) -> None:
    """Replay the recording of the case once; add the first step that is wrong in it."""
    assert trials.case.captured is not None
    if trials.program.is_random:
        random = [f"{s.name}{random_line(t)}" for s, t in _traced_steps(trials) if t.facts.is_random]
        subject = random[0] if random else "it"
        trials.notes.append(f"the replay of {trials.case.size}: {subject} draws random numbers, others at each run")
        return
    watching = watched(trials.program, trials.case.args, trials.case.visible)
    with trials.fresh():
        expected = watching.program.run(trials.case.args)
        state = _state(trials)
    with trials.fresh():
        trials.case.before_replay()
        outputs = trials.case.captured.replay()
        off = _first_wrong(trials, expected, outputs, masks) or _first_wrong_state(trials, state)
    trials.replayed = True
    if off is not None:
        _blame_replay(trials, expected, masks, *off)


def _traced_steps(trials: Trials) -> Iterator[tuple[Step, Traced]]:
    return zip(trials.program.steps, trials.program.traced, strict=False)


def _first_wrong(
    trials: Trials, expected: Sequence[Any], outputs: Sequence[Any], masks: Masks
) -> tuple[str, Distance] | None:
    undefined = _masks_of_outputs(trials, masks)
    fakes = [*trials.program.output_fakes, *[None] * len(outputs)]
    for position, (one, other) in enumerate(zip(expected, outputs, strict=False)):
        off = trials.distance(one, other, fakes[position], undefined.get(position))
        if off is not None:
            return f"output {position}", off
    return None


def _masks_of_outputs(trials: Trials, masks: Masks) -> dict[int, torch.Tensor | None]:
    by_slot = {
        slot: mask
        for step, found in zip(trials.program.steps, masks, strict=True)
        for slot, mask in zip(step.outputs, found, strict=False)
    }
    return {p: by_slot.get(o) for p, o in enumerate(trials.program.outputs) if isinstance(o, int)}


def _state(trials: Trials) -> list[tuple[str, torch.Tensor]]:
    """Copies of what the program writes to among its inputs."""
    given = zip(trials.program.inputs, trials.case.args, strict=True)
    return [(i.name, trials.case.visible(n, a).clone()) for n, (i, a) in enumerate(given) if i.is_written]


def _first_wrong_state(trials: Trials, expected: list[tuple[str, torch.Tensor]]) -> tuple[str, Distance] | None:
    for (name, one), (_, other) in zip(expected, _state(trials), strict=True):
        if (off := distance(one, other)) is not None:
            return f"what is written to {name}", off
    return None


def _blame_replay(trials: Trials, expected: Sequence[Any], masks: Masks, what: str, off: Distance) -> None:
    """The first step that a new recording, replayed on other values than it was made on, computes wrongly."""
    assert trials.case.record is not None
    watching = watched(trials.program, trials.case.args, trials.case.visible)
    trials.saved.restore()
    again = trials.case.record(watching.program)
    with trials.fresh():
        outputs = again.replay()
        for index, (first, end) in enumerate(watching.steps):
            fakes = trials.fakes_after(index, end - first)
            for position, place in enumerate(range(first, end)):
                mask = masks[index][position]
                step_off = trials.distance(expected[place], outputs[place], fakes[position], mask)
                if step_off is not None:
                    _add_replay(trials, index, position, step_off)
                    return
    _add_stale(trials, what, off)


def _add_replay(trials: Trials, index: int, position: int, off: Distance) -> None:
    step, traced = trials.program.steps[index], traced_of(trials.program, index)
    place = producer(traced, position)
    detail = ""
    if traced is not None and trials.case.recorder is not None:
        try:
            place = _node_at_fault(trials, index, traced) or place
        except Exception as error:
            detail = f"its operators cannot be recorded one by one ({type(error).__name__}: {error})"
    trials.add(Fault.REPLAY, step.name, place, off, detail)


def _node_at_fault(trials: Trials, index: int, traced: Traced) -> Place | None:
    assert trials.case.recorder is not None
    with trials.fresh():
        values = _inputs_of_step(trials.program, trials.case.args, index)
        return first_wrong_when_replayed(traced, values, trials.case.recorder)


def _add_stale(trials: Trials, what: str, off: Distance) -> None:
    assert trials.case.captured is not None
    eager = set(trials.case.captured.eager)
    inside = [i for i, step in enumerate(trials.program.steps) if step.name not in eager]
    found = suspects(trials.program, inside)
    detail = (
        "a new recording of the same steps is right, so this one holds an address or a number of the host that has "
        "changed since. " + ("Operators that may: those named" if found else "No operator in it is suspect")
    )
    place = (", ".join(op for op, _ in found), "; ".join(line for _, line in found))
    trials.add(Fault.REPLAY, what, place, off, detail)


def _inputs_of_step(program: Program, args: Sequence[Any], wanted: int) -> list[Any]:
    """Copies of what step `wanted` is given in a run without graphs."""
    slots = program.fill(args)
    for step in program.steps[:wanted]:
        for slot, value in zip(step.outputs, step.run(*[slots[i] for i in step.inputs]), strict=True):
            slots[slot] = value
    return [copied(slots[i]) for i in program.steps[wanted].inputs]
