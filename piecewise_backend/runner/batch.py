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
    uniform_query_len: int | None
    """The query length that all requests share, if all are past their prefill; else None."""
    is_dummy: bool = False
    """Made up: nothing of it may be written to any cache."""

    @classmethod
    def make(cls, requests: Sequence[ScheduledRequest], *, is_dummy: bool = False) -> InputBatch:
        """The batch of `requests`. ValueError for none, or for one without new tokens."""
        if not requests:
            raise ValueError("a batch needs at least one request")
        lengths = np.array([len(r.token_ids) for r in requests], dtype=np.int32)
        if not lengths.all():
            empty = [r.request_id for r in requests if not r.token_ids]
            raise ValueError(f"every request of a batch needs a new token, got none for {empty}")
        starts = np.zeros(len(requests) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        computed = np.array([r.num_computed_tokens for r in requests], dtype=np.int32)
        token_request = np.repeat(np.arange(len(requests), dtype=np.int32), lengths)
        uniform = all(r.is_decode for r in requests) and bool((lengths == lengths[0]).all())
        return cls(
            requests=tuple(requests),
            query_start_loc=starts,
            seq_lens=computed + lengths,
            token_request=token_request,
            positions=np.arange(starts[-1], dtype=np.int64) + (computed - starts[:-1])[token_request],
            uniform_query_len=int(lengths[0]) if uniform else None,
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
        requests = []
        for index in range(num_reqs):
            length = min(share + (index < extra), max_model_len)
            requests.append(
                ScheduledRequest(
                    request_id=f"dummy-{index}",
                    token_ids=[0] * length,
                    num_computed_tokens=max_model_len - length,
                    block_ids=(),
                    is_decode=descriptor.uniform_query_len is not None,
                )
            )
        return cls.make(requests, is_dummy=True)

    @property
    def num_reqs(self) -> int:
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    @property
    def max_query_len(self) -> int:
        return int(np.diff(self.query_start_loc).max())

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max())

    @property
    def logits_rows(self) -> np.ndarray:
        """int64: rows whose logits are wanted: each request's last token, and before it one for each draft token."""
        wanted = (
            np.arange(end - 1 - r.num_draft_tokens, end)
            for r, end in zip(self.requests, self.query_start_loc[1:], strict=True)
        )
        return np.concatenate(list(wanted)).astype(np.int64)

    def _check_blocks(self, block_size: int) -> None:
        """Each request's blocks must hold its sequence: what lies beyond them is another request's."""
        lengths = self.seq_lens.tolist()
        enough = all(len(r.block_ids) * block_size >= n for r, n in zip(self.requests, lengths, strict=True))
        if enough and self.positions[self.query_start_loc[:-1]].min() >= 0:
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
        slots = [r.state_slot for r in self.requests]
        if needs_state_slots and (min(slots) < 0 or max(slots) >= config.max_num_reqs or len(set(slots)) < len(slots)):
            raise ValueError(
                f"this model keeps states per request, so each needs a state_slot of its own from 0 to "
                f"{config.max_num_reqs - 1}, the same in all its steps; got {slots}"
            )
