"""From a requested mode and what the attention groups support, to what is recorded for each kind of batch.

Pure: takes facts, returns a frozen result in which every step is a typed reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attention.base import AttentionCGSupport
from attention.groups import AttentionCGSupportInfo, AttentionGroup
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.cudagraph.sizes import (
    DEFAULT_LARGEST,
    clean_capture_sizes,
    default_capture_sizes,
    uniform_capture_sizes,
)
from piecewise_backend.reasons import Reason, ReasonCode


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchKind:
    """One kind of batch: the padded sizes captured for it, and the layers recorded inside its graphs."""

    uniform_query_len: int | None
    """None for mixed batches."""
    mode: CUDAGraphMode
    sizes: tuple[int, ...]
    recorded_layers: frozenset[str]
    """Layers whose operators are recorded: breakpoints that do not break, and operators inside of pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCudagraphs:
    """What start-up decided; everything later reads it."""

    requested: CUDAGraphMode
    mode: CUDAGraphMode
    """The label: what the weakest group allows for all of them together."""
    decode: BatchKind
    mixed: BatchKind
    splitting_ops: tuple[str, ...]
    """Operators that belong into pieces, and break the graph because their metadata cannot be captured."""
    reasons: tuple[Reason, ...]

    def kind_of(self, descriptor: BatchDescriptor) -> BatchKind:
        """The kind of batch that a descriptor is for."""
        return self.mixed if descriptor.uniform_query_len is None else self.decode

    def descriptors(self, max_num_reqs: int) -> tuple[BatchDescriptor, ...]:
        """Every variant to capture, largest first."""
        kinds = [self.mixed] if self.decode == self.mixed else [self.mixed, self.decode]
        found = [describe(kind, size, max_num_reqs) for kind in kinds for size in kind.sizes]
        return tuple(sorted(found, key=lambda d: (-d.num_tokens, d.uniform_query_len or 0)))


def describe(kind: BatchKind, size: int, max_num_reqs: int) -> BatchDescriptor:
    """The descriptor of `size` tokens in a batch of `kind`."""
    if kind.uniform_query_len is not None:
        query_len = kind.uniform_query_len
        return BatchDescriptor(
            mode=kind.mode,
            num_tokens=size,
            num_reqs=size // query_len,
            uniform_query_len=query_len,
            max_query_len=query_len,
        )
    if not kind.recorded_layers:
        return BatchDescriptor(mode=kind.mode, num_tokens=size)
    return BatchDescriptor(mode=kind.mode, num_tokens=size, num_reqs=min(size, max_num_reqs), max_query_len=size)


def resolve_mode(
    requested: CUDAGraphMode, support: AttentionCGSupportInfo, decode_query_len: int, pieces_available: bool
) -> tuple[CUDAGraphMode, tuple[Reason, ...]]:
    """The label of a model: the best mode that its weakest group allows.

    ValueError for FULL with a backend that never records.
    """
    level, reasons = support.min_support, []

    def adapt(to: CUDAGraphMode, because: str) -> CUDAGraphMode:
        reasons.append(
            Reason(
                ReasonCode.MODE_ADAPTED,
                f"mode {requested.name}",
                f"{because}: {to.name}",
                f"an attention backend with more support than {support.set_by!r} lifts this",
            )
        )
        return to

    piecewise_or_none = CUDAGraphMode.PIECEWISE if pieces_available else CUDAGraphMode.NONE
    mode = requested
    if mode is CUDAGraphMode.PIECEWISE and not pieces_available:
        mode = adapt(CUDAGraphMode.NONE, "the graph is not split, so there are no pieces")
    if mode is CUDAGraphMode.FULL and level is AttentionCGSupport.NEVER:
        raise ValueError(
            f"mode FULL cannot be had: attention backend {support.set_by!r} can never be recorded. Allowed with it: "
            "NONE, PIECEWISE, FULL_DECODE_ONLY and FULL_AND_PIECEWISE (the last two become PIECEWISE); or choose "
            "another attention backend"
        )
    if mode is CUDAGraphMode.FULL and level < AttentionCGSupport.ALWAYS:
        to = CUDAGraphMode.FULL_AND_PIECEWISE if pieces_available else CUDAGraphMode.FULL_DECODE_ONLY
        mode = adapt(to, f"{support.set_by!r} records only {level.name}, not mixed batches")
    if mode.separates_decode and level < least_for_decode(decode_query_len):
        mode = adapt(
            piecewise_or_none, f"{support.set_by!r} is {level.name}, too little for decode of {decode_query_len} tokens"
        )
    if mode is CUDAGraphMode.FULL_AND_PIECEWISE and not pieces_available:
        mode = adapt(CUDAGraphMode.FULL_DECODE_ONLY, "the graph is not split, so there are no pieces")
    return mode, tuple(reasons)


def least_for_decode(decode_query_len: int) -> AttentionCGSupport:
    """The support that recording uniform decode needs."""
    if decode_query_len == 1:
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return AttentionCGSupport.UNIFORM_BATCH


def resolve_cudagraph_mode_and_sizes(
    requested: CUDAGraphMode,
    groups: Sequence[AttentionGroup],
    support: AttentionCGSupportInfo,
    *,
    max_num_tokens: int,
    max_num_reqs: int,
    decode_query_len: int = 1,
    capture_sizes: Sequence[int] | None = None,
    decode_capture_sizes: Sequence[int] | None = None,
    pieces_available: bool = True,
    strict_minimum: bool = False,
) -> ResolvedCudagraphs:
    """Decide label, sizes, and group by group what is recorded in each kind of batch.

    `decode_query_len`: query length of uniform decode, 1 + draft tokens. `strict_minimum`: the weakest group decides
    for all of them; else a group that was asked to be recorded, and can be, is.
    """
    mode, reasons = resolve_mode(requested, support, decode_query_len, pieces_available)
    mixed_needs, decode_needs = AttentionCGSupport.ALWAYS, least_for_decode(decode_query_len)
    sizes = _sizes(capture_sizes, max_num_tokens)
    mixed = BatchKind(
        uniform_query_len=None,
        mode=mode.mixed,
        sizes=sizes if mode.mixed is not CUDAGraphMode.NONE else (),
        recorded_layers=_recorded_layers(groups, requested.mixed, mode.mixed, mixed_needs, strict_minimum),
    )
    own_sizes = sizes if decode_capture_sizes is None else _sizes(decode_capture_sizes, max_num_tokens)
    decode = BatchKind(
        uniform_query_len=decode_query_len,
        mode=mode.decode,
        sizes=uniform_capture_sizes(
            own_sizes, query_len=decode_query_len, max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens
        )
        if mode.decode is not CUDAGraphMode.NONE
        else (),
        recorded_layers=_recorded_layers(groups, requested.decode, mode.decode, decode_needs, strict_minimum),
    )
    if decode.mode is mixed.mode is not CUDAGraphMode.FULL and decode.recorded_layers == mixed.recorded_layers:
        decode = mixed  # no graphs of its own. Full ones are worth it: attention is told that queries are short.
    splitting_ops = _too_weak_for_pieces(groups, mixed, decode, decode_needs)
    return ResolvedCudagraphs(
        requested=requested,
        mode=mode,
        decode=decode,
        mixed=mixed,
        splitting_ops=splitting_ops,
        reasons=(*reasons, *_group_reasons(groups, requested, mixed, decode), *_split_reasons(splitting_ops)),
    )


def _sizes(given: Sequence[int] | None, max_num_tokens: int) -> tuple[int, ...]:
    if given is None:
        return default_capture_sizes(min(max_num_tokens, DEFAULT_LARGEST))
    return clean_capture_sizes(given, limit=max_num_tokens)


def _recorded_layers(
    groups: Sequence[AttentionGroup],
    requested: CUDAGraphMode,
    resolved: CUDAGraphMode,
    needs: AttentionCGSupport,
    strict_minimum: bool,
) -> frozenset[str]:
    """The layers recorded in one kind of batch, which was asked to be `requested` and is labelled `resolved`."""
    if resolved is CUDAGraphMode.NONE:
        return frozenset()
    wants_breakpoints = (resolved if strict_minimum else requested) is CUDAGraphMode.FULL
    recorded = (g for g in groups if g.support >= needs and (g.in_piece or wants_breakpoints))
    return frozenset(name for group in recorded for name in group.layer_names)


def _too_weak_for_pieces(
    groups: Sequence[AttentionGroup], mixed: BatchKind, decode: BatchKind, decode_needs: AttentionCGSupport
) -> tuple[str, ...]:
    """Operators inside of pieces that some captured kind of batch could not record."""
    needs = [AttentionCGSupport.NEVER]
    if mixed.mode is not CUDAGraphMode.NONE:
        needs.append(AttentionCGSupport.ALWAYS)
    if decode.mode is not CUDAGraphMode.NONE:
        needs.append(decode_needs)
    return tuple(sorted({g.spec.operator for g in groups if g.in_piece and g.support < max(needs)}))


def _group_reasons(
    groups: Sequence[AttentionGroup], requested: CUDAGraphMode, mixed: BatchKind, decode: BatchKind
) -> list[Reason]:
    """Why a group breaks the graph where it was asked not to."""
    reasons = []
    for kind, asked, name in ((decode, requested.decode, "decode"), (mixed, requested.mixed, "mixed")):
        if asked is not CUDAGraphMode.FULL or kind.mode is CUDAGraphMode.NONE:
            continue
        for group in groups:
            if not kind.recorded_layers.issuperset(group.layer_names):
                reasons.append(
                    Reason(
                        ReasonCode.GROUP_BREAKS,
                        f"{group} in {name} batches",
                        f"runs between graphs: its metadata builder is {group.support.name}",
                        "only its operators break the graph, unless strict_minimum is set",
                    )
                )
    return reasons


def _split_reasons(splitting_ops: Sequence[str]) -> list[Reason]:
    return [
        Reason(
            ReasonCode.OPERATOR_SPLITS,
            operator,
            "cannot be recorded for every captured batch, so it is a breakpoint instead of a part of the pieces",
        )
        for operator in splitting_ops
    ]
