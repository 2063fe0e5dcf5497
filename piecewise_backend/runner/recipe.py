"""A traced program as plain data, and back: pieces by the keys of their artifacts, operators between them as graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piecewise_backend.breakpoints import Breakpoint
from piecewise_backend.compile import CompiledPiece, PieceCompiler
from piecewise_backend.cudagraph.capture import Step
from piecewise_backend.facts import Forbidden
from piecewise_backend.program import Constant, Input, Program
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.reporting.records import PieceReport, StepReport
from piecewise_backend.reporting.report import Report
from piecewise_backend.runner.graph_rows import graph_rows, read_graph
from piecewise_backend.runner.symbolic import NotPlain, ValueReader, ValueWriter

_AS_THEY_ARE = ("name", "inputs", "outputs", "frees", "launches", "layer", "operands")
"""Fields of a step that are plain data already."""
_IN_REPORT_ANEW = frozenset({ReasonCode.ARTIFACT_NOT_SAVED, ReasonCode.ARTIFACT_UNREADABLE})


class PieceMissing(Exception):
    """A program needs a piece whose artifact is not on disk, or not valid for the traced sizes."""


def write_recipe(program: Program, report: Report) -> dict[str, Any]:
    """`program` and what compiling it put into `report`. NotPlain where something has no form as plain data."""
    values = ValueWriter()
    return {
        "inputs": [[i.name, values.number(i.fake), i.is_static, i.is_written, i.storage] for i in program.inputs],
        "steps": [_step_row(step, program.pieces, values) for step in program.steps],
        "outputs": [o if isinstance(o, int) else {"constant": values.number(o.value)} for o in program.outputs],
        "output_fakes": [values.number(f) for f in program.output_fakes],
        "output_storage": list(program.output_storage),
        "num_slots": program.num_slots,
        "is_random": program.is_random,
        "pieces": [piece.key for piece in program.pieces],
        "values": values.rows,
        "hints": values.hints,
        "name": report.name,
        "step_reports": [dataclasses.asdict(s) for s in report.steps],
        "structures": {key: dataclasses.asdict(s) for key, s in report.structures.items()},
        "reasons": [
            [r.code.value, r.subject, r.detail, r.hint] for r, _ in report.reasons if r.code not in _IN_REPORT_ANEW
        ],
    }


def _step_row(step: Step, pieces: Sequence[CompiledPiece], values: ValueWriter) -> dict[str, Any]:
    piece = next((p.key for p in pieces if p.run is step.run), None)
    row: dict[str, Any] = {name: getattr(step, name) for name in _AS_THEY_ARE}
    row["piece"] = piece
    if piece is None:
        module = getattr(step.run, "__self__", None)
        if not isinstance(module, fx.GraphModule):
            raise NotPlain(f"the step {step.name!r}, which is no graph")
        row["graph"] = graph_rows(module)
    row["breakpoint"] = None if step.breakpoint is None else dataclasses.asdict(step.breakpoint)
    row["forbidden"] = None if step.forbidden is None else dataclasses.asdict(step.forbidden)
    row["input_fakes"] = [values.number(f) for f in step.input_fakes]
    row["output_fakes"] = [values.number(f) for f in step.output_fakes]
    return row


def read_recipe(recipe: Mapping[str, Any], compiler: PieceCompiler, mode: str) -> tuple[Program, Report]:
    """The program that was written, with the pieces that `compiler` finds under its keys, and a fresh report.

    PieceMissing where one is not there; LookupError, TypeError and the like for what is no recipe of ours.
    """
    reader = ValueReader(recipe["values"], recipe["hints"])
    pieces = _load_pieces(recipe, compiler, reader.values)
    steps = tuple(_step(row, pieces, reader.values) for row in recipe["steps"])
    program = Program(
        inputs=tuple(Input(name, reader.values[fake], *facts) for name, fake, *facts in recipe["inputs"]),
        steps=steps,
        outputs=tuple(o if isinstance(o, int) else Constant(reader.values[o["constant"]]) for o in recipe["outputs"]),
        output_fakes=tuple(reader.values[f] for f in recipe["output_fakes"]),
        output_storage=tuple(recipe["output_storage"]),
        num_slots=recipe["num_slots"],
        pieces=tuple(pieces.values()),
        is_random=recipe["is_random"],
    )
    reasons = compiler.reasons
    reasons.extend(Reason(ReasonCode(code), *texts) for code, *texts in recipe["reasons"])
    report = Report(
        name=recipe["name"],
        mode_requested=mode,
        mode_resolved=mode,
        recorder="none",
        num_pieces=program.num_pieces,
        num_breakpoints=len(program.breakpoints),
        compiled={key: piece.source for key, piece in pieces.items()},
        compile_seconds=0.0,
        steps=tuple(StepReport(**row) for row in recipe["step_reports"]),
        structures={key: _piece_report(row, pieces) for key, row in recipe["structures"].items()},
        reasons=reasons,
    )
    return program, report


def _load_pieces(recipe: Mapping[str, Any], compiler: PieceCompiler, values: Sequence[Any]) -> dict[str, CompiledPiece]:
    users = {row["piece"]: row for row in reversed(recipe["steps"])}
    found = {}
    for key in recipe["pieces"]:
        sizes = [values[i] for i in users[key]["input_fakes"] if isinstance(values[i], torch.SymInt)]
        piece = compiler.load(key, sizes)
        if piece is None:
            raise PieceMissing(f"piece {key[:12]} is not on disk")
        found[key] = piece
    return found


def _step(row: Mapping[str, Any], pieces: Mapping[str, CompiledPiece], values: Sequence[Any]) -> Step:
    piece = None if row["piece"] is None else pieces[row["piece"]]
    operands = row["operands"]
    return Step(
        name=row["name"],
        run=piece.run if piece is not None else _LateModule(read_graph(row["graph"])),
        inputs=tuple(row["inputs"]),
        outputs=tuple(row["outputs"]),
        frees=tuple(row["frees"]),
        opaque=piece is not None and piece.opaque,
        launches=row["launches"],
        breakpoint=None if row["breakpoint"] is None else Breakpoint(**row["breakpoint"]),
        forbidden=None if row["forbidden"] is None else Forbidden(**row["forbidden"]),
        layer=row["layer"],
        operands=None if operands is None else tuple(operands),
        input_fakes=tuple(values[i] for i in row["input_fakes"]),
        output_fakes=tuple(values[i] for i in row["output_fakes"]),
    )


class _LateModule:
    """A graph, made a module when it is first run: of a model's many like operators a start runs only a few."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._forward: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self._forward is None:
            self._forward = fx.GraphModule(torch.nn.Module(), self._graph).forward
        return self._forward(*args)


def _piece_report(row: Mapping[str, Any], pieces: Mapping[str, CompiledPiece]) -> PieceReport:
    """As it was, but for where the piece came from this time."""
    piece = pieces.get(row["key"])
    now = {} if piece is None else {"source": piece.source, "seconds": piece.seconds}
    return PieceReport(**{**row, "launches": tuple(map(tuple, row["launches"])), **now})
