"""Cases of a compiled function: every size that was captured for the graphs that a call runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from piecewise_backend.cudagraph.capture import CapturedProgram, Padded, capture_session
from piecewise_backend.plain import PlainCaller
from piecewise_backend.program import Program
from piecewise_backend.variants import Variant, aliases_as_traced, own_address_inputs, same_addresses, sizes_text
from piecewise_backend.verifying.case import Case


def cases_of(program: Program, caller: Any, args: Sequence[Any], name: str) -> tuple[list[Case], list[str]]:
    """One case for each captured size, or one without graphs; and what could not be made a case, in words.

    `args` of one call; other sizes repeat or leave out its rows.
    """
    if not isinstance(caller, PlainCaller) or not caller.variants:
        return [_without_graphs(program, args, name)], []
    cases, notes = [], []
    for variant in caller.variants:
        size = f"{name}, {sizes_text(variant.target)}"
        why = _why_not(program, variant, args)
        if why is not None:
            notes.append(f"{size}: {why}")
            continue
        cases.append(_captured_case(program, caller, variant, args, size))
    return cases or [_without_graphs(program, args, name)], notes


def _why_not(program: Program, variant: Variant, args: Sequence[Any]) -> str | None:
    if not same_addresses(args, variant.addresses, own_address_inputs(program)):
        return "it was recorded on other parameters or written tensors than those of this call"
    given = [a for a, i in zip(args, program.inputs, strict=True) if isinstance(i.fake, torch.SymInt)]
    if variant.target.exact and list(variant.target.sizes) != given and len(set(given)) > 1:
        return "it is of several sizes that are not those of this call"
    if not aliases_as_traced(program, args):
        return "the inputs share memory in another pattern than when the graph was traced"
    if variant.target.size and not any(given):
        return "the call has no rows to take it from"
    return None


def _without_graphs(program: Program, args: Sequence[Any], name: str) -> Case:
    return Case(
        size=name,
        program=program,
        args=list(args),
        fill=contextlib.nullcontext,
        visible=lambda slot, value: value,
        rows=lambda value, fake: value,
    )


def _captured_case(program: Program, caller: PlainCaller, variant: Variant, args: Sequence[Any], size: str) -> Case:
    count = variant.target.size
    real = resized(program, args, count) if count else list(args)
    altered = [_altered(value) if index in caller.copied else value for index, value in enumerate(real)]

    @contextlib.contextmanager
    def filled(values: Sequence[Any]) -> Iterator[None]:
        before, variant.rows.count = variant.rows.count, count
        variant.static.bind(count)(values)
        try:
            yield
        finally:
            variant.rows.count = before

    def record(watching: Program) -> CapturedProgram:
        recorded = frozenset(variant.captured.recorded)
        padded = None if variant.target.exact else Padded(caller.dim, count, variant.rows)
        with filled(altered), capture_session(caller.recorder):
            return watching.capture(
                variant.static.args,
                recorder=caller.recorder,
                records=lambda step: step.name in recorded,
                execute=True,
                padded=padded,
            )

    return Case(
        size=size,
        program=program,
        args=variant.static.args,
        fill=functools.partial(filled, real),
        visible=lambda slot, value: value,
        rows=lambda value, fake: value,
        captured=variant.captured,
        recorder=caller.recorder,
        record=record,
    )


def resized(program: Program, args: Sequence[Any], count: int) -> list[Any]:
    """`args` with `count` rows: those there are, again and again."""
    dim = program.token_dim
    result = []
    for given, value in zip(program.inputs, args, strict=True):
        if isinstance(given.fake, torch.SymInt):
            value = dim.evaluate(given.fake, count)
        elif dims := dim.dims(given.fake):
            rows = value
            for d in dims:
                wanted = torch.arange(dim.evaluate(given.fake.shape[d], count), device=value.device)
                rows = rows.index_select(d, wanted % value.shape[d])
            value = rows
        result.append(value)
    return result


def _altered(value: Any) -> Any:
    """Values to record on: other ones than those of the check; integers may be indices and only change places."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype.is_floating_point:
        return value * 0.5 + 0.25
    return value.flip(0) if value.ndim else value
