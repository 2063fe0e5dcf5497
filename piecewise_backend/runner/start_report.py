"""What start-up decided, as the report has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from attention.base import AttentionCGSupport
from attention.groups import AttentionGroup
from piecewise_backend.cudagraph.modes import CUDAGraphMode
from piecewise_backend.cudagraph.resolve import BatchKind, ResolvedCudagraphs
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.reporting.records import GroupReport, KindReport, StoryStep
from piecewise_backend.reporting.report import Report
from piecewise_backend.reporting.story import sizes_in_words, told
from piecewise_backend.runner.model_state import GroupNotCapturable


def report_start(
    report: Report,
    name: str,
    resolved: ResolvedCudagraphs,
    groups: Sequence[AttentionGroup],
    before: Sequence[Reason] = (),
) -> None:
    """Write modes, sizes, groups and the reasons of resolution into a fresh report.

    `before`: what happened on the way to this resolution, as backends passed over and support levels lowered.
    """
    report.name = name
    report.mode_resolved = resolved.mode.name
    report.capture_sizes = resolved.mixed.sizes or resolved.decode.sizes
    report.groups = [_group_report(group, resolved) for group in groups]
    report.kinds = _kind_reports(resolved)
    report.story = tuple(_story(resolved, groups, before))
    report.reasons.extend((*resolved.reasons, *before))


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


def _kind_reports(resolved: ResolvedCudagraphs) -> tuple[KindReport, ...]:
    mixed = KindReport(
        name="mixed",
        what="prefills, and prefills beside decodes",
        mode=resolved.mixed.mode.name,
        why_none=f"mode {resolved.mode.name} records no mixed batches",
    )
    if resolved.decode == resolved.mixed:
        return (dataclasses.replace(mixed, what="every batch; decode has no graphs of its own"),)
    query_len = resolved.decode.uniform_query_len or 1
    decode = KindReport(
        name="decode",
        what=f"every request past its prefill, {query_len} token{'s' if query_len > 1 else ''} each",
        mode=resolved.decode.mode.name,
        why_none=f"mode {resolved.mode.name} records no decode batches",
    )
    return (decode, mixed)


def _story(
    resolved: ResolvedCudagraphs, groups: Sequence[AttentionGroup], before: Sequence[Reason]
) -> Iterator[StoryStep]:
    """From the mode that was asked for to what is recorded in each kind of batch, in the order of deciding."""
    yield StoryStep(title=f"asked for {resolved.requested.name}")
    yield from map(told, before)
    for group in groups:
        place = "in pieces" if group.in_piece else "between pieces"
        yield StoryStep(title=f"attention group {group}", detail=f"supports {group.support.name}, {place}")
    yield from map(told, resolved.reasons)
    if resolved.mode is resolved.requested:
        yield StoryStep(title=f"resolved to {resolved.mode.name}", detail="as asked")
    else:
        yield StoryStep(title=f"resolved to {resolved.mode.name}", detail="what the weakest group allows for all")
    kinds = [("mixed", resolved.mixed)] if resolved.decode == resolved.mixed else _both(resolved)
    for name, kind in kinds:
        sizes = f"sizes {sizes_in_words(kind.sizes)}" if kind.sizes else "no sizes"
        yield StoryStep(title=f"{name} batches: {kind.mode.name}", detail=f"{sizes}; {_groups_recorded(kind, groups)}")


def _both(resolved: ResolvedCudagraphs) -> list[tuple[str, BatchKind]]:
    return [("decode", resolved.decode), ("mixed", resolved.mixed)]


def _groups_recorded(kind: BatchKind, groups: Sequence[AttentionGroup]) -> str:
    if kind.mode is CUDAGraphMode.NONE:
        return "compiled pieces without graphs"
    recorded = [group.backend.name for group in groups if kind.recorded_layers.issuperset(group.layer_names)]
    if len(recorded) == len(groups):
        return "every group is recorded" if groups else "no attention"
    return f"recorded: {', '.join(recorded) or 'pieces only'}"


def _group_report(group: AttentionGroup, resolved: ResolvedCudagraphs) -> GroupReport:
    def fate(kind: BatchKind) -> str:
        if kind.mode is CUDAGraphMode.NONE:
            return "no graphs"
        return "recorded" if kind.recorded_layers.issuperset(group.layer_names) else "breaks"

    def why(kind: BatchKind, asked: CUDAGraphMode) -> str:
        if fate(kind) != "breaks":
            return ""
        if asked is CUDAGraphMode.FULL:
            return f"its metadata builder is {group.support.name}, too little for these batches"
        return f"mode {kind.mode.name} runs attention between graphs"

    return GroupReport(
        backend=group.backend.name,
        num_layers=len(group.layer_names),
        support=group.support.name,
        in_piece=group.in_piece and group.spec.operator not in resolved.splitting_ops,
        decode=fate(resolved.decode),
        mixed=fate(resolved.mixed),
        decode_why=why(resolved.decode, resolved.requested.decode),
        mixed_why=why(resolved.mixed, resolved.requested.mixed),
        layers=group.layer_names,
    )


def uncaptured_reason(num_tokens: int) -> Reason:
    """Of a step that runs without graphs beside captured sizes."""
    return Reason(
        ReasonCode.ABOVE_ALL_SIZES,
        f"{num_tokens} tokens",
        "no captured size holds this batch",
        "add a size to options={'capture_sizes': [...]}",
    )
