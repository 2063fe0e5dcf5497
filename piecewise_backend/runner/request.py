"""One request: its prompt, how it is sampled, and how far it has come."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from piecewise_backend.runner.batch import NO_STATE_SLOT


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when to stop."""

    max_tokens: int = 16
    """New tokens at most."""
    temperature: float = 0.0
    """0 is greedy; else logits are divided by it."""
    top_k: int = 0
    """Only the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Only the smallest set of tokens whose probability reaches p (nucleus, https://arxiv.org/abs/1904.09751)."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is in the batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on past end-of-sequence tokens."""

    def __post_init__(self) -> None:
        if not _is_integer(self.max_tokens) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be an integer of at least 1, got {self.max_tokens!r}")
        if not _is_number(self.temperature) or not (self.temperature == 0 or _LEAST <= self.temperature < math.inf):
            raise ValueError(
                f"temperature must be 0 (greedy), or finite and at least {_LEAST}, got {self.temperature!r}"
            )
        if not _is_integer(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k must be an integer, 0 (all) or more, got {self.top_k!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if self.seed is not None and not (_is_integer(self.seed) and -(1 << 63) <= self.seed < 1 << 63):
            raise ValueError(f"seed must be an integer of 64 bits, or None, got {self.seed!r}")
        stops: Any = self.stop_token_ids
        if not isinstance(stops, Collection) or isinstance(stops, str) or not all(map(_is_integer, stops)):
            raise ValueError(f"stop_token_ids must be a tuple of token ids, () for none, got {stops!r}")


_LEAST = 1e-5
"""Of temperatures: logits divided by less are infinite before long."""


def _is_integer(value: Any) -> bool:
    """Of any kind: Python's, NumPy's."""
    return isinstance(value, numbers.Integral)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


UNKNOWN_TOKEN = -1
"""Stands for a token that has been sampled and has not reached the host yet."""


@dataclass(slots=True, eq=False)
class Request:
    """A request being served."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    block_ids: list[int] = field(default_factory=list)
    state_slot: int = NO_STATE_SLOT
    """Its row in per-request caches while it runs."""
    draft_ids: list[int] = field(default_factory=list)
    """Guesses of what comes next, to be verified in the next step."""
    finish_reason: str | None = None
    """None while running; "stop", "length" or "aborted"."""
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def is_complete(self) -> bool:
        """All tokens that were asked for have been sampled, though the host may not know the last one yet."""
        return len(self.output_ids) >= self.params.max_tokens

    @property
    def awaits_token(self) -> bool:
        """Its newest token has not reached the host."""
        return bool(self.output_ids) and self.output_ids[-1] == UNKNOWN_TOKEN

    @property
    def is_decode(self) -> bool:
        """Past its prefill. After a preemption the output so far is prefilled again too, as one longer prompt."""
        return bool(self.output_ids) and self.num_computed_tokens == self.num_tokens - 1

    def tokens(self, start: int, stop: int) -> Sequence[int]:
        """Tokens `start` to `stop` of prompt and output."""
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return self.output_ids[start - prompt : stop - prompt]
        return [*self.prompt_ids[start:stop], *self.output_ids[: max(0, stop - prompt)]]

    def preempt(self) -> list[int]:
        """Start over: everything is computed again later. Returns the blocks that are free now."""
        blocks, self.block_ids = self.block_ids, []
        self.num_computed_tokens = 0
        self.draft_ids = []
        self.num_preemptions += 1
        return blocks
