"""Compressed attention in plain PyTorch, request by request, for the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attention.backends.chunks import chunks
from attention.specs import CompressedAttentionSpec

if TYPE_CHECKING:
    from attention.backends.compressed_attention.backend import CompressedAttentionMetadata


def compressed_attention(
    query: torch.Tensor,
    local_cache: torch.Tensor,
    compressed_cache: torch.Tensor,
    metadata: CompressedAttentionMetadata,
    out: torch.Tensor,
    spec: CompressedAttentionSpec,
) -> None:
    """See `CompressedAttentionImpl.forward`. Computed in fp32 at least. All on the CPU."""
    compute = torch.promote_types(query.dtype, torch.float32)
    window, ratio = spec.window, spec.ratio
    for chunk in chunks(query.shape[0], metadata.token_request, metadata.query_start_loc, metadata.seq_lens):
        table = metadata.block_table[chunk.request]
        positions = torch.arange(chunk.start, chunk.seq_len)[:, None]
        # Only what some query of the request sees is read: beyond it the caches and the table may hold anything.
        latents = torch.arange(max(0, chunk.start - window + 1), chunk.seq_len)
        entries = torch.arange(chunk.seq_len // ratio)
        keys = torch.cat([_rows(local_cache, table, latents), _rows(compressed_cache, table, entries)]).to(compute)
        in_window = (latents <= positions) & (latents > positions - window)
        complete = (entries + 1) * ratio - 1 <= positions
        scores = torch.einsum("qhd,nd->hqn", query[chunk.tokens].to(compute), keys) * spec.scale
        scores = scores.masked_fill(~torch.cat([in_window, complete], dim=1), float("-inf"))
        out[chunk.tokens] = torch.einsum("hqn,nd->qhd", scores.softmax(-1), keys).to(out.dtype)


def _rows(cache: torch.Tensor, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[len(index), head_size]: rows of a paged cache by their logical index in one request."""
    per_block = cache.shape[1]
    return cache[table[index // per_block].long(), index % per_block]
