"""What became of each step in each kind of batch: recorded, run between graphs, or never captured, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from piecewise_backend.reasons import ReasonCode
from piecewise_backend.reporting.records import Fate, GroupReport, KindReport, SizeReport, StepReport

if TYPE_CHECKING:
    from piecewise_backend.reporting.report import Report


def kinds_of(report: Report) -> list[KindReport]:
    """The declared kinds of batch; for a plain call, which declares none, those that were captured so far."""
    if report.kinds:
        why = _why_none(report) if report.recorder == "none" else ""
        return [dataclasses.replace(k, mode="NONE", why_none=why) if why else k for k in report.kinds]
    found = []
    for name, what in (("padded", "calls padded up to a capture size"), ("exact", "calls of exactly a captured size")):
        captured = [s for s in report.sizes if s.kind == name]
        if captured:
            mode = "PIECEWISE" if any(s.eager_ops for s in captured) else "FULL"
            found.append(KindReport(name=name, what=what, mode=mode))
    return found or [KindReport(name="calls", what="every call", mode="NONE", why_none=_why_none(report))]


def _why_none(report: Report) -> str:
    """Why nothing is recorded at all; or, as captures may still come, that none has."""
    if report.mode_requested == "NONE":
        return "mode NONE was asked for"
    deciding = {ReasonCode.NO_RECORDER, ReasonCode.INPUT_NOT_STATIC}
    told = [f"{reason.subject}: {reason.detail}" for reason, _ in report.reasons if reason.code in deciding]
    if told:
        return told[0]
    return "no recorder is in use" if report.recorder == "none" else "no size has been captured yet"


def fate_of(
    step: StepReport, kind: KindReport, sizes: Sequence[SizeReport], groups: Sequence[GroupReport]
) -> tuple[Fate, str]:
    """(fate, why it is not recorded or "") of a step, told from what was captured."""
    captured = [s for s in sizes if s.kind == kind.name]
    if kind.mode == "NONE":
        return Fate.NEVER, kind.why_none
    if step.never:
        return Fate.NEVER, step.never
    if not captured:
        return Fate.NEVER, "no size of this kind was captured; the reasons are under what went another way"
    if not any(step.name in s.eager_ops for s in captured):
        return Fate.RECORDED, ""
    return Fate.EAGER, _why_eager(step, kind, groups)


def _why_eager(step: StepReport, kind: KindReport, groups: Sequence[GroupReport]) -> str:
    if not step.capturable:
        return "nobody vouched that its kernels can be recorded: register_breakpoint(op, capturable=True) does"
    group = next((g for g in groups if step.layer in g.layers), None)
    if group is not None and (why := group.decode_why if kind.name == "decode" else group.mixed_why):
        return why
    if not step.owns_metadata and kind.name != "exact":
        return "it is given the real rows only, and this batch is padded"
    return f"mode {kind.mode} runs breakpoints between graphs"
