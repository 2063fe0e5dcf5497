"""Findings of what the backend itself reports: operators in pieces, fixed dimensions, fallbacks."""

from __future__ import annotations

import contextlib
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from piecewise_backend.dry_run.breaks import line_of
from piecewise_backend.dry_run.explanation import Finding
from piecewise_backend.dynamic import check_marked_dims
from piecewise_backend.program import Program
from piecewise_backend.reasons import Reason, ReasonCode, is_fallback
from piecewise_backend.source_lines import source_line

_PLACE = re.compile(r"(?P<place>.+?:\d+), in [^:]+: ?(?P<source>.*)", re.DOTALL)
_FIXED = re.compile(
    r"fixes it at (?P<size>\d+)(?:, in (?P<place>.+?:\d+)(?:, in [^:]+: (?P<source>.*?))?)?\. Make that"
)
FIXED_HINT = "make that line work for any size: cut a buffer of fixed length to the size of the input"


class _Found(Exception):
    """Ends a trace that was made to find out one thing."""


def of_reasons(reasons: Iterable[Reason], program: Program) -> Iterator[Finding]:
    """A finding for each reason that is a loss; operators in pieces come with their names and lines."""
    forbidden = {str(step.forbidden): step.forbidden for step in program.steps if step.forbidden is not None}
    for reason in reasons:
        if not is_fallback(reason.code):
            continue
        if (what := forbidden.get(reason.detail)) is not None:
            place, source = split_line(what.line)
            why = f"{what.why} ({reason.subject})"
            yield Finding(code=reason.code, op=what.op, place=place, source=source, why=why, hint=reason.hint)
        else:
            yield Finding(code=reason.code, op=reason.subject, place="", source="", why=reason.detail, hint=reason.hint)


def of_fixed_dim(
    model: Callable[..., Any], args: Sequence[Any], marked: Sequence[torch.Tensor], dim: int
) -> list[Finding]:
    """The line that fixes the dynamic dimension `dim` of the `marked` arguments, if one does: by a trace of its own."""
    found: list[Finding] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        try:
            check_marked_dims(gm)
        except ValueError as error:
            found.append(fixed_finding(str(error), gm))
        raise _Found

    for tensor in marked:
        torch._dynamo.mark_dynamic(tensor, dim)
    with contextlib.suppress(Exception), torch.no_grad():  # whatever else is wrong, the dry run itself tells
        torch.compile(lambda *values: model(*values), backend=backend)(*args)
    return found


def fixed_finding(message: str, gm: fx.GraphModule | None = None) -> Finding:
    """A finding of the error of `check_marked_dims`; the operator is looked up in the graph it is about."""
    found = _FIXED.search(message)
    place = (found and found["place"]) or ""
    file, _, line = place.rpartition(":")
    source = (found and found["source"]) or (linecache.getline(file, int(line)).strip() if place else "")
    return Finding(
        code=ReasonCode.SIZE_FIXED,
        op=_operator_at(gm, place) if gm is not None else source,
        place=place,
        source=source,
        why=f"the model works at one size only: this fixes the dynamic dimension at {found['size']}"
        if found
        else message,
        hint=FIXED_HINT,
    )


def of_failing_size(model: Callable[..., Any], args: Sequence[Any], count: int) -> Finding | None:
    """The operator and line on which the model itself fails at `count` rows; None where it does not fail."""
    last = _LastOperator()
    try:
        with torch.no_grad(), last:
            model(*args)
    except Exception as error:
        place, source = line_of(error)
        what = (str(error).splitlines() or [type(error).__name__])[0]
        why = f"the model itself fails at {count} rows: {what}"
        return Finding(
            code=ReasonCode.SIZE_FIXED, op=last.name or source, place=place, source=source, why=why, hint=FIXED_HINT
        )
    return None


class _LastOperator(TorchDispatchMode):
    name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


def _operator_at(gm: fx.GraphModule, place: str) -> str:
    """The last operator of a line that combines tensors, else its last one."""
    nodes = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method") and _is_at(n, place)]
    several = [n for n in nodes if len(n.all_input_nodes) > 1]
    chosen = (several or nodes)[-1:] or [None]
    target = getattr(chosen[0], "target", "")
    return str(getattr(target, "__name__", target)) or "a comparison of sizes"


def _is_at(node: fx.Node, place: str) -> bool:
    return bool(place) and source_line(node).startswith(f"{place},")


def split_line(line: str) -> tuple[str, str]:
    """("file:line", code) of `source_line`'s text."""
    found = _PLACE.fullmatch(line)
    return (found["place"], found["source"]) if found is not None else (line, "")
