"""A report as plain data: what JSON and every view of it are made from.

Keys are stable within one `format`; new ones may be added. Times are in seconds, memory in bytes, shares from 0 to 1.

    format             1
    name               the model or the place of the first traced line
    mode               {requested, resolved}
    recorder           "cuda", "emulated" or "none"
    compile_seconds    splitting, compiling and loading
    capture_sizes      padded sizes that may be captured; [] where sizes are captured as they come
    kinds              kinds of batch: [{name, what, mode, why_none}]
    program            {num_pieces, num_breakpoints, source, seconds, steps, rows}; source is "traced" or "disk", and
                       seconds (0 for a plain call) are those of all that came before the captures
      steps            [{index, name, is_breakpoint, structure, layer, line, fates: {kind: {fate, why}}}]; fate is
                       "recorded", "eager" or "never captured"
      rows             the same row folded: [{repeat, steps: [[indices of one step in all repeats]]}]
    pieces             distinct structures: [{structure, is_breakpoint, key, source, seconds, indices, launches:
                       [{operator, times}], kernels: [{name, language, code}], library_calls, code, generated}];
                       code and generated (Inductor's whole module) are text or null
    groups             layers with caches: [{backend, layers, num_layers, support, in_piece, decode, decode_why, mixed,
                       mixed_why}]
    story              [{title, detail, code, hint}]; code is null where a step is no typed reason
    captures           [{descriptor, kind, num_tokens, num_graphs, seconds, memory_bytes, replays, padded_rows,
                       padding_waste, eager_ops, dropped}]; padding_waste is null before the first replay
    estimated_graph_bytes, num_replays, uncaptured_runs
    fallbacks          by code: [{code, is_fallback, times, hints, reasons: [{subject, detail, hint, times}]}]
    speculation        {method, num_draft_tokens, proposed, accepted, acceptance_rate} or null
    draft              the draft model's report or null
    others             reports of the other graphs of the same compiled function
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from piecewise_backend.piece_code import generated_code
from piecewise_backend.reasons import Reason, is_fallback
from piecewise_backend.reporting.fates import fate_of, kinds_of
from piecewise_backend.reporting.fold import fold
from piecewise_backend.reporting.kernels import kernel_sources, library_calls
from piecewise_backend.reporting.records import KindReport, PieceReport, SizeReport, StepReport, StoryStep
from piecewise_backend.reporting.story import story_of

if TYPE_CHECKING:
    from piecewise_backend.reporting.report import Report

FORMAT = 1


def as_dict(report: Report, *, code: bool = True) -> dict[str, Any]:
    """`report` as dicts, lists, strings, numbers, booleans and None. Without `code`, code texts are None."""
    kinds = kinds_of(report)
    draft = report.draft
    return {
        "format": FORMAT,
        "name": report.name,
        "mode": {"requested": report.mode_requested, "resolved": report.mode_resolved},
        "recorder": report.recorder,
        "compile_seconds": report.compile_seconds,
        "capture_sizes": list(report.capture_sizes),
        "kinds": [dataclasses.asdict(kind) for kind in kinds],
        "program": _program(report, kinds),
        "pieces": [_piece(piece, report.steps, code) for piece in report.structures.values()],
        "groups": [dataclasses.asdict(group) | {"layers": list(group.layers)} for group in report.groups],
        "story": [_story_step(step) for step in story_of(report)],
        "captures": [_size(s, False) for s in report.sizes] + [_size(s, True) for s in report.dropped],
        "estimated_graph_bytes": report.estimated_graph_bytes,
        "num_replays": report.num_replays,
        "uncaptured_runs": report.uncaptured_runs,
        "fallbacks": _fallbacks(list(report.reasons)),
        "speculation": _speculation(report),
        "draft": None if draft is None else as_dict(draft, code=code),
        "others": [as_dict(other, code=code) for other in report.others],
    }


def _program(report: Report, kinds: list[KindReport]) -> dict[str, Any]:
    steps = [_step(step, report, kinds) for step in report.steps]
    alike = [(s["structure"], s["is_breakpoint"], *(f["fate"] for f in s["fates"].values())) for s in steps]
    return {
        "num_pieces": report.num_pieces,
        "num_breakpoints": report.num_breakpoints,
        "source": report.program_source,
        "seconds": report.program_seconds,
        "steps": steps,
        "rows": [
            {"repeat": run.repeats, "steps": [run.places(offset) for offset in range(run.period)]}
            for run in fold(alike)
        ],
    }


def _step(step: StepReport, report: Report, kinds: list[KindReport]) -> dict[str, Any]:
    fates = {kind.name: fate_of(step, kind, report.sizes, report.groups) for kind in kinds}
    return {
        "index": step.index,
        "name": step.name,
        "is_breakpoint": step.is_breakpoint,
        "structure": step.structure,
        "layer": step.layer,
        "line": step.line,
        "fates": {name: {"fate": fate.value, "why": why} for name, (fate, why) in fates.items()},
    }


def _piece(piece: PieceReport, steps: tuple[StepReport, ...], code: bool) -> dict[str, Any]:
    like = [step for step in steps if step.structure == piece.structure]
    generated = generated_code(piece.key) if code and piece.key is not None else None
    return {
        "structure": piece.structure,
        "is_breakpoint": any(step.is_breakpoint for step in like),
        "key": piece.key,
        "source": piece.source,
        "seconds": piece.seconds,
        "indices": [step.index for step in like],
        "launches": [{"operator": name, "times": times} for name, times in piece.launches],
        "kernels": [{"name": n, "language": lang, "code": text} for n, lang, text in kernel_sources(generated)],
        "library_calls": library_calls(generated),
        "code": piece.code if code else None,
        "generated": generated,
    }


def _story_step(step: StoryStep) -> dict[str, Any]:
    reason = step.reason
    return {
        "title": step.title,
        "detail": step.detail,
        "code": None if reason is None else reason.code.value,
        "hint": "" if reason is None else reason.hint,
    }


def _size(size: SizeReport, dropped: bool) -> dict[str, Any]:
    return {
        "descriptor": size.descriptor,
        "kind": size.kind,
        "num_tokens": size.num_tokens,
        "num_graphs": size.num_graphs,
        "seconds": size.seconds,
        "memory_bytes": size.memory_bytes,
        "replays": size.replays,
        "padded_rows": size.padded_rows,
        "padding_waste": size.padding_waste,
        "eager_ops": list(size.eager_ops),
        "dropped": dropped,
    }


def _fallbacks(reasons: list[tuple[Reason, int]]) -> list[dict[str, Any]]:
    """Real fallbacks first; within that, codes in order of first occurrence."""
    codes = sorted(dict.fromkeys(reason.code for reason, _ in reasons), key=lambda code: not is_fallback(code))
    found = []
    for code in codes:
        of_code = [(reason, times) for reason, times in reasons if reason.code is code]
        found.append(
            {
                "code": code.value,
                "is_fallback": is_fallback(code),
                "times": sum(times for _, times in of_code),
                "hints": list(dict.fromkeys(reason.hint for reason, _ in of_code if reason.hint)),
                "reasons": [
                    {"subject": r.subject, "detail": r.detail, "hint": r.hint, "times": times} for r, times in of_code
                ],
            }
        )
    return found


def _speculation(report: Report) -> dict[str, Any] | None:
    found = report.speculation
    return None if found is None else dataclasses.asdict(found) | {"acceptance_rate": found.acceptance_rate}
