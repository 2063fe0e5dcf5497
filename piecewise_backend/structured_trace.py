"""The facts of compiling as artifacts in PyTorch's own trace: `TORCH_TRACE=folder`, then `tlparse folder`.

    mrv2_split         one a graph: its pieces and breakpoints in order, with inputs and outputs
    mrv2_piece_<key>   one a distinct piece: readable Python of what was traced
    mrv2_code_<key>    Inductor's output for it, where Inductor made it
    mrv2_resolution    JSON: modes asked for and resolved, sizes, the story and the reasons in order

On a terminal the same events are log lines: `TORCH_LOGS="+piecewise_backend"` (any module of the package works, for
example `TORCH_LOGS="piecewise_backend.compile"`), since each module logs under its own name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from piecewise_backend.piece_code import generated_code
from piecewise_backend.program import Program
from piecewise_backend.reporting.report import Report


def is_on() -> bool:
    """Whether anybody reads the trace."""
    return bool(torch._logging._internal.trace_log.handlers)


def trace_program(program: Program, report: Report) -> None:
    """Write the split and every distinct piece."""
    if not is_on():
        return
    _artifact("mrv2_split", "string", lambda: listing(program))
    for piece in report.structures.values():
        name = piece.structure if piece.key is None else piece.key[:12]
        code, key = piece.code, piece.key
        _artifact(f"mrv2_piece_{name}", "string", lambda code=code: code)  # type: ignore[misc]
        made = None if key is None else generated_code(key)
        if made is not None:
            _artifact(f"mrv2_code_{name}", "string", lambda made=made: made)  # type: ignore[misc]


def trace_resolution(report: Report) -> None:
    """Write what was decided for the graph or runner of `report`."""
    if is_on():
        _artifact("mrv2_resolution", "json", lambda: json.dumps(resolution(report), indent=1))


def resolution(report: Report) -> dict[str, Any]:
    """Modes, sizes, groups, the way there and the reasons, in order, as plain data."""
    facts = report.to_dict()
    kept = ("name", "mode", "recorder", "capture_sizes", "kinds", "groups", "story")
    reasons = [
        {"code": r.code.value, "subject": r.subject, "detail": r.detail, "hint": r.hint, "times": times}
        for r, times in report.reasons
    ]
    return {**{key: facts[key] for key in kept}, "reasons": reasons}


def listing(program: Program) -> str:
    """The program as text, one step a line: what it takes, what it makes, and the piece that it is.

    piece 0 (in0, in1) -> v4, v5        # piece 3f2a81bc09de
    """
    names = {slot: given.name for slot, given in enumerate(program.inputs)}
    lines = []
    keys = {id(p.run): p.key[:12] for p in program.pieces}
    for step in program.steps:
        given = ", ".join(names.get(s, f"v{s}") for s in step.inputs)
        made = ", ".join(f"v{s}" for s in step.outputs) or "nothing"
        key = keys.get(id(step.run))
        note = f"    # piece {key}" if key else f"    # never in a graph: {step.forbidden}" if step.forbidden else ""
        lines.append(f"{step.name} ({given}) -> {made}{note}")
    outputs = [names.get(o, f"v{o}") if isinstance(o, int) else repr(o.value) for o in program.outputs]
    return "\n".join([*lines, f"returns ({', '.join(outputs)})", ""])


def _artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,  # a runner resolves outside of any compilation
    )
