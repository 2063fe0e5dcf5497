"""The requests of a flat batch, one by one: what the plain references walk through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one request has in a batch."""

    request: int
    tokens: slice
    """Its rows of the flat batch."""
    start: int
    """Position of its first token; the tokens before it are in the caches."""
    seq_len: int
    """Position after its last token."""


def chunks(
    num_tokens: int, token_request: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> Iterator[Chunk]:
    """Every request with a token among the first `num_tokens`, in order.

    token_request [>= num_tokens], query_start_loc [>= num_reqs + 1], seq_lens [>= num_reqs]: int32, read on the host.
    Requests are found through the tokens, so whatever the tensors hold past the batch is never looked at.
    """
    for request in sorted(set(token_request[:num_tokens].tolist()) - {-1}):
        first, end = query_start_loc[request : request + 2].tolist()
        seq_len = int(seq_lens[request])
        yield Chunk(request=request, tokens=slice(first, end), start=seq_len - (end - first), seq_len=seq_len)
