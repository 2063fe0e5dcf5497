"""What start-up decided, as the report has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attention.base import AttentionCGSupport
from attention.groups import AttentionGroup
from piecewise_backend.cudagraph.modes import CUDAGraphMode
from piecewise_backend.cudagraph.resolve import BatchKind, ResolvedCudagraphs
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.report import GroupReport, Report
from piecewise_backend.runner.model_state import GroupNotCapturable


def report_start(report: Report, name: str, resolved: ResolvedCudagraphs, groups: Sequence[AttentionGroup]) -> None:
    """Write modes, sizes, groups and the reasons of resolution into a fresh report."""
    report.name = name
    report.mode_resolved = resolved.mode.name
    report.capture_sizes = resolved.mixed.sizes or resolved.decode.sizes
    report.groups = [_group_report(group, resolved) for group in groups]
    report.reasons.extend(resolved.reasons)


def passed_over_reasons(passed_over: Iterable[tuple[str, str]]) -> list[Reason]:
    """Reasons for backends, by name, that were not chosen."""
    return [
        Reason(ReasonCode.BACKEND_CHOSEN, f"attention backend {name!r}", f"passed over: {why}")
        for name, why in passed_over
    ]


def support_left(refusal: GroupNotCapturable) -> AttentionCGSupport:
    """What a group still supports whose builder refused metadata for one kind of batch."""
    query_len = refusal.descriptor.uniform_query_len
    if query_len is None:
        return min(AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport(refusal.group.support - 1))
    return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if query_len > 1 else AttentionCGSupport.NEVER


def lowered_reason(refusal: GroupNotCapturable) -> Reason:
    """The reason for a support level that is not the declared one."""
    group = refusal.group
    return Reason(
        ReasonCode.SUPPORT_LOWERED,
        str(group),
        f"declares {group.support.name}, taken as {support_left(refusal).name}: {refusal.__cause__}",
        f"declare it in {type(group.builder).__name__}.cudagraph_support",
    )


def _group_report(group: AttentionGroup, resolved: ResolvedCudagraphs) -> GroupReport:
    def fate(kind: BatchKind) -> str:
        if kind.mode is CUDAGraphMode.NONE:
            return "no graphs"
        return "recorded" if kind.recorded_layers.issuperset(group.layer_names) else "breaks"

    return GroupReport(
        backend=group.backend.name,
        num_layers=len(group.layer_names),
        support=group.support.name,
        in_piece=group.in_piece and group.spec.operator not in resolved.splitting_ops,
        decode=fate(resolved.decode),
        mixed=fate(resolved.mixed),
    )
