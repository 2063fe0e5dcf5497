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
    """As `kernels.short_conv`, of the same arguments and result, on the CPU: any strides. Computed in fp32 at least."""
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
