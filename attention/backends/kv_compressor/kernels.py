"""The KV compressor as two launches: the entries first, then the windows' state that they were computed from.

Grids depend on sizes alone: each program finds its request on the device, so a recorded launch is right for any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096
"""Elements of a window that a program holds at a time."""


@triton.jit
def compress_kernel(
    kv, score, weight, window_state, compressed_cache, block_table, token_request, query_start_loc, seq_lens,
    state_slots, eps,
    stride_kv, stride_score, stride_score_dim, stride_state_slot, stride_state_row, stride_state_kind,
    stride_cache_block, stride_cache_row, stride_table,
    DIM: tl.constexpr, RATIO: tl.constexpr, NUM_STATES: tl.constexpr, PER_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token): the entry whose window this token ends; other tokens leave."""
    token = tl.program_id(0)
    request = tl.load(token_request + token)
    if request < 0:
        return
    slot = tl.load(state_slots + request).to(tl.int64)
    first = tl.load(query_start_loc + request)
    position = tl.load(seq_lens + request) - (tl.load(query_start_loc + request + 1) - token)
    if slot < 0 or (position + 1) % RATIO != 0:
        return

    dims = tl.arange(0, BLOCK_D)
    inside = (dims < DIM)[None, :]
    # Finite, so that a tile of nothing but scores of -inf does not become NaN; below any real score.
    top = tl.full([BLOCK_D], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(0, RATIO, ROWS):
        row = begin + tl.arange(0, ROWS)
        back = RATIO - 1 - row
        # The state may still hold the same position from tokens that were rejected: the batch's own come first.
        from_batch = (row < RATIO) & (token - back >= first)
        from_state = (row < RATIO) & (token - back < first)
        new_mask, old_mask = from_batch[:, None] & inside, from_state[:, None] & inside
        batch_row = (token - back).to(tl.int64)[:, None]
        state_row = slot * stride_state_slot + ((position - back) % NUM_STATES) * stride_state_row
        old = window_state + state_row[:, None] + dims[None, :]
        new_kv = tl.load(kv + batch_row * stride_kv + dims[None, :], mask=new_mask, other=0.0)
        new_score = tl.load(
            score + batch_row * stride_score + dims[None, :] * stride_score_dim, mask=new_mask, other=0.0
        )
        old_kv = tl.load(old, mask=old_mask, other=0.0)
        old_score = tl.load(old + stride_state_kind, mask=old_mask, other=0.0)
        values = tl.where(from_batch[:, None], new_kv.to(tl.float32), old_kv)
        scores = tl.where(from_batch[:, None], new_score.to(tl.float32), old_score)
        scores = tl.where((row < RATIO)[:, None], scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 0))
        decay = tl.exp(top - new_top)
        weights = tl.exp(scores - new_top[None, :])
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights * values, 0)
        top = new_top

    mixed = tl.where(dims < DIM, acc / total, 0.0)
    scale = 1 / tl.sqrt(tl.sum(mixed * mixed, 0) / DIM + eps)
    normed = mixed * scale * tl.load(weight + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    entry = position // RATIO
    block = tl.load(block_table + request.to(tl.int64) * stride_table + entry // PER_BLOCK).to(tl.int64)
    target = compressed_cache + block * stride_cache_block + (entry % PER_BLOCK) * stride_cache_row
    tl.store(target + dims, normed.to(compressed_cache.dtype.element_ty), mask=dims < DIM)


@triton.jit
def write_window_kernel(
    kv,
    score,
    window_state,
    token_request,
    query_start_loc,
    seq_lens,
    state_slots,
    stride_kv,
    stride_score,
    stride_score_dim,
    stride_state_slot,
    stride_state_row,
    stride_state_kind,
    DIM: tl.constexpr,
    NUM_STATES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (token): one of its request's last NUM_STATES tokens goes to the state, to a row of its own."""
    token = tl.program_id(0)
    request = tl.load(token_request + token)
    if request < 0:
        return
    slot = tl.load(state_slots + request).to(tl.int64)
    left = tl.load(query_start_loc + request + 1) - token
    if slot < 0 or left > NUM_STATES:
        return
    position = tl.load(seq_lens + request) - left
    dims = tl.arange(0, BLOCK_D)
    row = token.to(tl.int64)
    new_kv = tl.load(kv + row * stride_kv + dims, mask=dims < DIM)
    new_score = tl.load(score + row * stride_score + dims * stride_score_dim, mask=dims < DIM)
    target = window_state + slot * stride_state_slot + (position % NUM_STATES) * stride_state_row + dims
    tl.store(target, new_kv.to(tl.float32), mask=dims < DIM)
    tl.store(target + stride_state_kind, new_score.to(tl.float32), mask=dims < DIM)


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
    """See `attention.layers.KVCompressor`: writes the entries that this batch completes, and the windows' state.

    kv, score: [T, dim]; score may be expanded from [T, 1]. weight: [dim]. window_state: [num_slots, R, 2, dim] fp32,
    gets (kv, score) of the last R tokens of each request; R is at least ratio - 1. compressed_cache:
    [num_blocks, block_size // ratio, dim]. block_table: [max_num_reqs, max_num_blocks] int32. token_request [>= T],
    query_start_loc [>= num_reqs + 1], seq_lens and state_slots [>= num_reqs]: int32. Computed in fp32. All on one CUDA
    device; any strides, with last dimensions contiguous.
    """
    _check_strides(
        score, block_table, kv=kv, weight=weight, window_state=window_state, compressed_cache=compressed_cache
    )
    num_tokens, dim = kv.shape
    if num_tokens == 0:
        return
    block_d = triton.next_power_of_2(dim)
    strides = (kv.stride(0), score.stride(0), score.stride(1), *window_state.stride()[:3])
    facts = (token_request, query_start_loc, seq_lens, state_slots)
    sizes = {
        "DIM": dim,
        "NUM_STATES": window_state.shape[1],
        "BLOCK_D": block_d,
        "num_warps": 4 if block_d <= 1024 else 8,
    }
    compress_kernel[(num_tokens,)](
        *(kv, score, weight, window_state, compressed_cache, block_table, *facts, eps),
        *(*strides, *compressed_cache.stride()[:2], block_table.stride(0)),
        RATIO=ratio,
        PER_BLOCK=compressed_cache.shape[1],
        ROWS=max(1, min(triton.next_power_of_2(ratio), _TILE // block_d)),
        **sizes,
    )
    # A launch of its own: within one, a program could overwrite what another has yet to read.
    write_window_kernel[(num_tokens,)](kv, score, window_state, *facts, *strides, **sizes)


def _check_strides(score: torch.Tensor, block_table: torch.Tensor, **tensors: torch.Tensor) -> None:
    strided = {name: tensor.stride() for name, tensor in tensors.items() if tensor.stride(-1) != 1}
    if strided or score.stride(1) not in (0, 1) or block_table.stride(1) != 1:
        raise ValueError(
            "compress_kv needs contiguous last dimensions (of score, or expanded), got strides "
            f"{strided}, score {score.stride()}, block_table {block_table.stride()}; call .contiguous()"
        )
