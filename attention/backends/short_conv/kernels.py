"""The short convolution as two launches: the results first, then the states that they were computed from.

Grids depend on sizes alone: each row finds its request on the device, so a recorded launch is right for any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK_T = 8
_MAX_BLOCK_D = 128


@triton.jit
def locate(token, num_tokens, token_request, query_start_loc, seq_lens, state_slots):
    """Tokens -> which are real, their requests' first tokens and ends, their positions and states' slots."""
    request = tl.load(token_request + token, mask=token < num_tokens, other=-1)
    real = request >= 0
    first = tl.load(query_start_loc + request, mask=real, other=0)
    end = tl.load(query_start_loc + request + 1, mask=real, other=0)
    position = tl.load(seq_lens + request, mask=real, other=0) - (end - token)
    slot = tl.load(state_slots + request, mask=real, other=-1).to(tl.int64)
    return real, first, end, position, slot


@triton.jit(do_not_specialize=["num_tokens"])
def conv_kernel(
    x,
    weight,
    bias,
    conv_state,
    out,
    token_request,
    query_start_loc,
    seq_lens,
    state_slots,
    num_tokens,
    stride_x,
    stride_weight_dim,
    stride_weight_tap,
    stride_state_slot,
    stride_state_row,
    stride_out,
    DIM: tl.constexpr,
    KERNEL_SIZE: tl.constexpr,
    NUM_STATES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (tokens, dims): a tile of `out`."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real, first, _, position, slot = locate(token, num_tokens, token_request, query_start_loc, seq_lens, state_slots)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (dims < DIM)[None, :]
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + dims, mask=dims < DIM, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(KERNEL_SIZE):
        # The state may still hold the same position from tokens that were rejected: the batch's own come first.
        from_batch = real & (token - back >= first)
        from_state = real & (token - back < first) & (position >= back) & (slot >= 0)
        batch_rows = x + (token - back).to(tl.int64) * stride_x
        state_rows = conv_state + slot * stride_state_slot + ((position - back) % NUM_STATES) * stride_state_row
        new = tl.load(batch_rows[:, None] + dims[None, :], mask=from_batch[:, None] & inside, other=0.0)
        old = tl.load(state_rows[:, None] + dims[None, :], mask=from_state[:, None] & inside, other=0.0)
        tap = weight + dims * stride_weight_dim + (KERNEL_SIZE - 1 - back) * stride_weight_tap
        taps = tl.load(tap, mask=dims < DIM, other=0.0).to(tl.float32)
        # At most one of the two is loaded; the other is 0.
        acc += (new.to(tl.float32) + old.to(tl.float32)) * taps[None, :]
    if SILU:
        acc = acc * tl.sigmoid(acc)
    out_rows = out + token.to(tl.int64) * stride_out
    tl.store(out_rows[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=real[:, None] & inside)


@triton.jit(do_not_specialize=["num_tokens"])
def write_state_kernel(
    x,
    conv_state,
    token_request,
    query_start_loc,
    seq_lens,
    state_slots,
    num_tokens,
    stride_x,
    stride_state_slot,
    stride_state_row,
    DIM: tl.constexpr,
    NUM_STATES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (tokens, dims): inputs among their request's last NUM_STATES go to the state, each to its own row."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real, _, end, position, slot = locate(token, num_tokens, token_request, query_start_loc, seq_lens, state_slots)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    kept = real & (slot >= 0) & (end - token <= NUM_STATES)
    mask = kept[:, None] & (dims < DIM)[None, :]
    batch_rows = x + token.to(tl.int64) * stride_x
    state_rows = conv_state + slot * stride_state_slot + (position % NUM_STATES) * stride_state_row
    values = tl.load(batch_rows[:, None] + dims[None, :], mask=mask)
    tl.store(state_rows[:, None] + dims[None, :], values.to(conv_state.dtype.element_ty), mask=mask)


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
    seq_lens and state_slots [>= num_reqs]: int32. Accumulated in fp32. All on one CUDA device; any strides, with the
    last dimensions of x, bias and conv_state contiguous.
    """
    _check_strides(x, bias, conv_state)
    num_tokens, dim = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    block_d = min(triton.next_power_of_2(dim), _MAX_BLOCK_D)
    grid = (triton.cdiv(num_tokens, _BLOCK_T), triton.cdiv(dim, block_d))
    facts = (token_request, query_start_loc, seq_lens, state_slots, num_tokens)
    sizes = {"DIM": dim, "NUM_STATES": conv_state.shape[1], "BLOCK_T": _BLOCK_T, "BLOCK_D": block_d, "num_warps": 4}
    state_strides = conv_state.stride()[:2]
    conv_kernel[grid](
        *(x, weight, bias, conv_state, out, *facts),
        *(x.stride(0), *weight.stride(), *state_strides, out.stride(0)),
        KERNEL_SIZE=weight.shape[1],
        HAS_BIAS=bias is not None,
        SILU=silu,
        **sizes,
    )
    # A launch of its own: within one, a program could overwrite what another has yet to read.
    write_state_kernel[grid](x, conv_state, *facts, x.stride(0), *state_strides, **sizes)
    return out


def _check_strides(x: torch.Tensor, bias: torch.Tensor | None, conv_state: torch.Tensor) -> None:
    if x.stride(1) != 1 or conv_state.stride(2) != 1 or (bias is not None and bias.stride(0) != 1):
        raise ValueError(
            "short_conv needs x, conv_state and bias with contiguous last dimensions, got strides "
            f"x {x.stride()}, conv_state {conv_state.stride()}, bias {bias.stride() if bias is not None else None}; "
            "call .contiguous()"
        )
