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
    decode_capture_sizes,
    default_capture_sizes,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCudagraphs:
    """What start-up decided; everything later reads it."""

    requested: CUDAGraphMode
    mode: CUDAGraphMode
    decode: BatchKind
    mixed: BatchKind
    reasons: tuple[Reason, ...]

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
    pieces_available: bool = True,
) -> ResolvedCudagraphs:
    """Decide label, sizes, and group by group what is recorded in each kind of batch."""
    mode, reasons = resolve_mode(requested, support, decode_query_len, pieces_available)
    limit = min(max_num_tokens, DEFAULT_LARGEST) if capture_sizes is None else max_num_tokens
    sizes = default_capture_sizes(limit) if capture_sizes is None else clean_capture_sizes(capture_sizes, limit=limit)
    nothing = frozenset[str]()
    everything = frozenset(name for group in groups for name in group.layer_names)
    mixed = BatchKind(
        uniform_query_len=None,
        mode=mode.mixed,
        sizes=sizes if mode.mixed is not CUDAGraphMode.NONE else (),
        recorded_layers=everything if mode.mixed is CUDAGraphMode.FULL else nothing,
    )
    decode = mixed
    if mode.separates_decode:
        decode = BatchKind(
            uniform_query_len=decode_query_len,
            mode=mode.decode,
            sizes=decode_capture_sizes(sizes, query_len=decode_query_len, max_num_reqs=max_num_reqs),
            recorded_layers=everything,
        )
    return ResolvedCudagraphs(requested=requested, mode=mode, decode=decode, mixed=mixed, reasons=reasons)
