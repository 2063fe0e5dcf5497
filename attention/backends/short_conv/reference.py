"""The short convolution in plain PyTorch, request by request, for the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from attention.backends.chunks import Chunk, chunks


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    token_request: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    state_slots: torch.Tensor,
    silu: bool,
) -> torch.Tensor:
    """See `attention.layers.ShortConv`. Returns [T, dim], contiguous, in x's dtype; padded tokens' rows are undefined.

    x: [T, dim]. weight: [dim, kernel_size]. bias: [dim] or None. conv_state: [num_slots, R, dim], gets the last R
    inputs of each request; R is at least kernel_size - 1. token_request [>= T], query_start_loc [>= num_reqs + 1],
    seq_lens and state_slots [>= num_reqs]: int32. Computed in fp32 at least. All on the CPU.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    compute = torch.promote_types(x.dtype, torch.float32)
    kernel_size, num_states = weight.shape[1], conv_state.shape[1]
    for chunk in chunks(x.shape[0], token_request, query_start_loc, seq_lens):
        slot = int(state_slots[chunk.request])
        tokens = x[chunk.tokens]
        context = _context(conv_state, slot, chunk, kernel_size - 1)
        history = torch.cat([context.to(compute), tokens.to(compute)])
        windows = history.unfold(0, kernel_size, 1)  # [q, dim, kernel_size]
        result = (windows * weight.to(compute)).sum(-1)
        if bias is not None:
            result = result + bias.to(compute)
        out[chunk.tokens] = F.silu(result) if silu else result
        if slot >= 0:
            last = torch.arange(max(chunk.start, chunk.seq_len - num_states), chunk.seq_len)
            conv_state[slot, last % num_states] = tokens[-len(last) :].to(conv_state.dtype)
    return out


def _context(conv_state: torch.Tensor, slot: int, chunk: Chunk, length: int) -> torch.Tensor:
    """[length, dim]: the inputs before the chunk's first; zeros before position 0 and for an inert request."""
    positions = torch.arange(chunk.start - length, chunk.start)
    context = conv_state.new_zeros(length, conv_state.shape[2])
    if slot >= 0:
        known = positions >= 0
        context[known] = conv_state[slot, positions[known] % conv_state.shape[1]]
    return context
