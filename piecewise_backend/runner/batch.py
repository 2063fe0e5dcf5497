"""One batch: which tokens of which requests, and how it is padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from piecewise_backend.cudagraph.modes import BatchDescriptor
from piecewise_backend.runner.config import RunnerConfig

NO_STATE_SLOT = -1
"""Of a request without per-request states, and of dummy requests: nothing is read or written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """What one request computes in one step."""

    request_id: str
    token_ids: Sequence[int]
    """The new tokens."""
    num_computed_tokens: int
    """Tokens already in the cache."""
    block_ids: Sequence[int]
    """Physical blocks, covering the new tokens too."""
    is_decode: bool
    """Past its prefill: all tokens of its prompt are in the cache already."""
    state_slot: int = NO_STATE_SLOT
    """Where the request's states lie in per-request caches, from its first step to its last; only models with such
    layers need one."""
    num_draft_tokens: int = 0
    """How many of the new tokens, at the end, are guesses to be verified: logits are wanted for each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """A step's requests in order, on the host.

    Tokens of request r are `query_start_loc[r] : query_start_loc[r + 1]` of the flat batch.
    """

    requests: tuple[ScheduledRequest, ...]
    query_start_loc: np.ndarray
    """[num_reqs + 1] int32."""
    seq_lens: np.ndarray
    """[num_reqs] int32: tokens in the cache after this step."""
    token_request: np.ndarray
    """[num_tokens] int32: each token's request."""
    positions: np.ndarray
    """[num_tokens] int64: each token's place in its request."""
    logits_rows: np.ndarray
    """int64: rows whose logits are wanted: each request's last token, and before it one for each draft token."""
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    uniform_query_len: int | None
    """The query length that all requests share, if all are past their prefill; else None."""
    is_dummy: bool = False
    """Made up: nothing of it may be written to any cache."""

    @classmethod
    def make(cls, requests: Sequence[ScheduledRequest], *, is_dummy: bool = False) -> InputBatch:
        """The batch of `requests`. ValueError for none, or for one without new tokens."""
        if not requests:
            raise ValueError("a batch needs at least one request")
        lengths = [len(r.token_ids) for r in requests]
        if 0 in lengths:
            empty = [r.request_id for r, length in zip(requests, lengths, strict=True) if not length]
            raise ValueError(f"every request of a batch needs a new token, got none for {empty}")
        counts = np.array(lengths, dtype=np.int32)
        starts = np.zeros(len(requests) + 1, dtype=np.int32)
        counts.cumsum(out=starts[1:])
        computed = np.array([r.num_computed_tokens for r in requests], dtype=np.int32)
        seq_lens = computed + counts
        num_tokens, longest = int(starts[-1]), max(lengths)
        token_request = np.arange(len(requests), dtype=np.int32)
        positions = computed.astype(np.int64)
        if longest > 1:
            token_request = token_request.repeat(counts)
            positions = np.arange(num_tokens) + (positions - starts[:-1])[token_request]
        uniform = num_tokens == longest * len(requests) and all(r.is_decode for r in requests)
        return cls(
            requests=tuple(requests),
            query_start_loc=starts,
            seq_lens=seq_lens,
            token_request=token_request,
            positions=positions,
            logits_rows=_logits_rows(requests, starts[1:].astype(np.int64)),
            num_tokens=num_tokens,
            max_query_len=longest,
            max_seq_len=int(seq_lens.max()),
            uniform_query_len=longest if uniform else None,
            is_dummy=is_dummy,
        )

    @classmethod
    def make_dummy(cls, descriptor: BatchDescriptor, *, max_num_reqs: int, max_model_len: int) -> InputBatch:
        """A batch that fills `descriptor`, with sequences as long as the model allows.

        Lengths steer kernels to the choices that long sequences need; block tables are dummies and slots inert, so
        nothing is written.
        """
        tokens = descriptor.num_tokens
        num_reqs = descriptor.num_reqs or min(tokens, max_num_reqs)
        share, extra = divmod(tokens, num_reqs)
        longer, shorter = (_dummy_request(descriptor, length, max_model_len) for length in (share + 1, share))
        return cls.make([longer] * extra + [shorter] * (num_reqs - extra), is_dummy=True)

    @property
    def num_reqs(self) -> int:
        return len(self.requests)

    def _check_blocks(self, block_size: int) -> None:
        """Each request's blocks must hold its sequence: what lies beyond them is another request's."""
        lengths = self.seq_lens.tolist()
        enough = all(len(r.block_ids) * block_size >= n for r, n in zip(self.requests, lengths, strict=True))
        if enough and min(r.num_computed_tokens for r in self.requests) >= 0:
            return
        for request, length in zip(self.requests, lengths, strict=True):
            if request.num_computed_tokens < 0:
                raise ValueError(
                    f"request {request.request_id!r} has num_computed_tokens {request.num_computed_tokens}; it must be "
                    "0 or more"
                )
            if len(request.block_ids) * block_size < length:
                raise ValueError(
                    f"request {request.request_id!r} has {length} tokens after this step, but block_ids of "
                    f"{len(request.block_ids)} blocks of {block_size}; block_ids must cover the new tokens too"
                )

    def _check_drafts(self, most: int | None) -> None:
        """`most`: guesses whose rejection a model's states survive; None for a model without states."""
        if not any(r.num_draft_tokens for r in self.requests):
            return
        for request in self.requests:
            count = len(request.token_ids) - 1 if most is None else min(most, len(request.token_ids) - 1)
            if not 0 <= request.num_draft_tokens <= count:
                raise ValueError(
                    f"request {request.request_id!r} has num_draft_tokens {request.num_draft_tokens}, allowed are 0 to "
                    f"{count}: fewer than its token_ids"
                    + ("" if most is None else f", and as many as the runner's num_draft_tokens={most}")
                )

    def check_limits(self, config: RunnerConfig, *, needs_state_slots: bool) -> None:
        """ValueError for a batch beyond a runner's limits, or whose requests lack state slots where they need them."""
        for what, got, allowed in (
            ("tokens", self.num_tokens, config.max_num_tokens),
            ("requests", self.num_reqs, config.max_num_reqs),
            ("tokens in one sequence", self.max_seq_len, config.max_model_len),
            ("blocks of one request", max(len(r.block_ids) for r in self.requests), config.blocks_per_request),
        ):
            if got > allowed:
                raise ValueError(
                    f"a step of {got} {what} is beyond this runner's {allowed}; split it, or raise the limit"
                )
        self._check_blocks(config.block_size)
        self._check_drafts(config.num_draft_tokens if needs_state_slots else None)
        if needs_state_slots:
            self._check_state_slots(config.max_num_reqs)

    def _check_state_slots(self, count: int) -> None:
        slots = [r.state_slot for r in self.requests]
        if min(slots) < 0 or max(slots) >= count or len(set(slots)) < len(slots):
            raise ValueError(
                f"this model keeps states per request, so each needs a state_slot of its own from 0 to {count - 1}, "
                f"the same in all its steps; got {slots}"
            )


def _logits_rows(requests: Sequence[ScheduledRequest], ends: np.ndarray) -> np.ndarray:
    """`ends`: of the requests' tokens in the flat batch, [num_reqs] int64."""
    if not any(r.num_draft_tokens for r in requests):
        return ends - 1
    wanted = (np.arange(end - 1 - r.num_draft_tokens, end) for r, end in zip(requests, ends, strict=True))
    return np.concatenate(list(wanted))


def _dummy_request(descriptor: BatchDescriptor, length: int, max_model_len: int) -> ScheduledRequest:
    """A sequence as long as the model allows, `length` tokens of it new, as far as there are so many."""
    length = min(length, max_model_len)
    return ScheduledRequest(
        request_id="dummy",
        token_ids=[0] * length,
        num_computed_tokens=max_model_len - length,
        block_ids=(),
        is_decode=descriptor.uniform_query_len is not None,
    )
