"""Splits of the KV axis become one result: by the last split to finish, or by a kernel of its own."""

from __future__ import annotations

import triton
import triton.language as tl

from attention.backends.triton.work import find_query_block, share_of_split, visible_keys


@triton.jit
def merge_rows(
    first_row,
    num_rows,
    first,
    kv_head,
    partial_out,
    partial_lse,
    out,
    num_splits,
    used,
    stride_out_token,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
):
    """MERGE_ROWS rows of `out` from their first `used` splits: rows [first_row, ...) of the num_rows, token and query
    head, of the query block that starts at token `first`.

    Always in the order of the splits: the result does not depend on which of them was the last to finish.
    """
    dims = tl.arange(0, BLOCK_D)
    row = first_row + tl.arange(0, MERGE_ROWS)
    real = row < num_rows
    token = (first + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    partial = (token * NUM_HEADS + head) * num_splits
    top = tl.full([MERGE_ROWS], -1.0e30, tl.float32)
    total = tl.zeros([MERGE_ROWS], tl.float32)
    acc = tl.zeros([MERGE_ROWS, BLOCK_D], tl.float32)
    for split in tl.range(0, used, MERGE_SPLITS, num_stages=1):
        splits = split + tl.arange(0, MERGE_SPLITS)
        mask = real[:, None] & (splits < used)[None, :]
        at = partial[:, None] + splits[None, :]
        # From L2, where the other programs' stores are, whatever this multiprocessor's L1 holds.
        lse = tl.load(partial_lse + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        inside = mask[:, :, None] & (dims < HEAD_SIZE)[None, None, :]
        pointers = partial_out + at[:, :, None] * HEAD_SIZE + dims[None, None, :]
        part = tl.load(pointers, mask=inside, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(lse, 1))
        weights = tl.exp2(lse - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * part, 1)
        top = new_top
    acc = acc / tl.where(real, total, 1.0)[:, None]
    out_rows = token * stride_out_token + head * stride_out_head
    mask = real[:, None] & (dims < HEAD_SIZE)[None, :]
    tl.store(out + out_rows[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_reqs", "num_splits"])
def merge_kernel(
    partial_out,
    partial_lse,
    out,
    query_start_loc,
    seq_lens,
    num_reqs,
    num_splits,
    stride_out_token,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    WINDOW: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
):
    """Program (query block, KV head, part): MERGE_ROWS of a block's rows of `out`, for attention without MERGE."""
    first_row = tl.program_id(2) * MERGE_ROWS
    request, first, end = find_query_block(tl.program_id(0), query_start_loc, num_reqs, BLOCK_Q, ONE_BLOCK)
    num_rows = tl.minimum(end - first, BLOCK_Q) * GROUP
    seq_len = tl.load(seq_lens + request)
    if first_row >= num_rows:
        return
    first_key, key_end = visible_keys(first, end, seq_len, BLOCK_Q, WINDOW)
    _, _, used = share_of_split(first_key, key_end, 0, num_splits, UNIT, SPLIT_KEYS)
    if used == 1:
        return
    merge_rows(
        first_row,
        num_rows,
        first,
        tl.program_id(1),
        partial_out,
        partial_lse,
        out,
        num_splits,
        used,
        stride_out_token,
        stride_out_head,
        NUM_HEADS,
        GROUP,
        HEAD_SIZE,
        BLOCK_D,
        MERGE_ROWS,
        MERGE_SPLITS,
    )
