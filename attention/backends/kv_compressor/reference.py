"""The KV compressor in plain PyTorch, request by request, for the CPU."""

from __future__ import annotations

import torch

from attention.backends.chunks import chunks


def compress_kv(
    kv: torch.Tensor,
    score: torch.Tensor,
    weight: torch.Tensor,
    window_state: torch.Tensor,
    compressed_cache: torch.Tensor,
    block_table: torch.Tensor,
    token_request: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    state_slots: torch.Tensor,
    ratio: int,
    eps: float,
) -> None:
    """As `kernels.compress_kv`, of the same arguments, on the CPU: any strides. Computed in fp32."""
    num_states, per_block = window_state.shape[1], compressed_cache.shape[1]
    for chunk in chunks(kv.shape[0], token_request, query_start_loc, seq_lens):
        slot = int(state_slots[chunk.request])
        if slot < 0:
            continue
        tokens = torch.stack([kv[chunk.tokens], score[chunk.tokens]], dim=1).float()  # [q, 2, dim]
        waiting = torch.arange(chunk.start // ratio * ratio, chunk.start)
        rows = torch.cat([window_state[slot, waiting % num_states], tokens])
        num_entries = rows.shape[0] // ratio
        values, scores = rows[: num_entries * ratio].unflatten(0, (num_entries, ratio)).unbind(2)
        mixed = (scores.softmax(1) * values).sum(1)  # [num_entries, dim]
        normed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps) * weight.float()
        entries = chunk.start // ratio + torch.arange(num_entries)
        blocks = block_table[chunk.request, entries // per_block].long()
        compressed_cache[blocks, entries % per_block] = normed.to(compressed_cache.dtype)
        last = torch.arange(max(chunk.start, chunk.seq_len - num_states), chunk.seq_len)
        window_state[slot, last % num_states] = tokens[-len(last) :]
