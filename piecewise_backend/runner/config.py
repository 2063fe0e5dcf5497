"""Limits of one runner."""

from __future__ import annotations

from dataclasses import dataclass

from attention.specs import check_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Limits of one runner."""

    max_num_tokens: int = 512
    """Tokens of one step, over all requests."""
    max_num_reqs: int = 64
    max_model_len: int = 2048
    """Tokens of one request, prompt and output."""
    block_size: int = 16
    num_blocks: int | None = None
    """Blocks of the paged cache; None: as many as `max_num_reqs` full requests need, or as memory allows."""
    attention_backend: str | None = None
    """Force one; None chooses."""
    num_draft_tokens: int = 0
    """Tokens of a step that may be rejected afterwards: guesses that a decode step verifies besides its one token."""
    uniform_query_len: int | None = None
    """Tokens of each request in a decode step; None: 1 + num_draft_tokens."""

    def __post_init__(self) -> None:
        for name in ("max_num_tokens", "max_num_reqs", "max_model_len", "block_size", "num_blocks"):
            check_at_least(1, **{name: getattr(self, name)})
        check_at_least(0, num_draft_tokens=self.num_draft_tokens)
        if self.max_num_reqs > self.max_num_tokens:
            raise ValueError(
                f"max_num_reqs ({self.max_num_reqs}) cannot exceed max_num_tokens ({self.max_num_tokens}): every "
                "running request needs a token in a step"
            )

    @property
    def decode_query_len(self) -> int:
        """Tokens of one request in a decode step."""
        return self.uniform_query_len or 1 + self.num_draft_tokens

    @property
    def blocks_per_request(self) -> int:
        """Blocks of a request of maximal length."""
        return -(-self.max_model_len // self.block_size)
