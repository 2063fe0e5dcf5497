"""The attention kernel, and the reduction over its splits of the KV axis.

Nothing about a launch depends on a batch's content: each program finds its own work in `query_start_loc`
and `seq_lens` on the device, or leaves. A recorded launch is right for any batch of the same padded sizes.
"""

# mypy: disallow-incomplete-defs=False, check-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_query_block(block, query_start_loc, num_reqs, BLOCK_Q: tl.constexpr, ONE_BLOCK: tl.constexpr):
    """Query block -> its request, its first token, and the end of the request's tokens.

    Request i starts at query block `query_start_loc[i] // BLOCK_Q + i`: never less than the blocks before it
    need, and computable without a prefix sum. Blocks in excess have a first token that is not before the end.
    With ONE_BLOCK no request is longer than BLOCK_Q, and block i is request i.
    """
    request = block
    if not ONE_BLOCK:
        request = 0
        after = num_reqs
        while after - request > 1:
            middle = (request + after) // 2
            if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block:
                request = middle
            else:
                after = middle
    start = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1)
    first = start
    if not ONE_BLOCK:
        first = start + (block - start // BLOCK_Q - request) * BLOCK_Q
    return request, first, end


@triton.jit
def visible_tiles(first, end, seq_len, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Keys that any row of a query block sees, [first_key, key_end), and the key tiles that hold them."""
    # Token t of a request is at position t + seq_len - end.
    key_end = tl.minimum(first + BLOCK_Q, end) + seq_len - end
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(first + seq_len - end - WINDOW + 1, 0)
    return first_key, key_end, first_key // BLOCK_N, tl.cdiv(key_end, BLOCK_N)


@triton.jit
def load_blocks(table_row, tile, first_key, key_end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Physical blocks of a key tile: one for all of it where it lies within a block, else one a key.

    Only entries with a key in [first_key, key_end) are read, the others are 0.
    """
    keys = tile * BLOCK_N
    readable = keys < key_end
    if BLOCK_N > BLOCK_SIZE:
        keys += tl.arange(0, BLOCK_N)
        readable = (keys >= first_key) & (keys < key_end)
    return tl.load(table_row + keys // BLOCK_SIZE, mask=readable, other=0)


@triton.jit(do_not_specialize=["num_reqs", "num_splits"])
def attention_kernel(
    query,
    kv_cache,
    out,
    partial_out,
    partial_lse,
    query_start_loc,
    seq_lens,
    block_table,
    num_reqs,
    num_splits,
    qk_scale,
    soft_cap_log2,
    stride_query_token,
    stride_query_head,
    stride_out_token,
    stride_out_head,
    stride_cache_block,
    stride_cache_kv,
    stride_cache_slot,
    stride_cache_head,
    stride_table,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
):
    """Program (query block, KV head, split): BLOCK_Q tokens of one request, all query heads of one KV head.

    Row r of the tile is token r // GROUP, query head r % GROUP. qk_scale takes a raw score to log2 units, or
    with SOFT_CAP to multiples of the cap, which soft_cap_log2 takes to log2 units. With SPLIT, a program does
    its share of the keys, and its normalised result goes to partial_out [token, head, split, HEAD_SIZE] fp32,
    with the log2 of the softmax's denominator in partial_lse [token, head, split] fp32.
    """
    # Later blocks of a prefill see more keys: the longest first, so that none runs on alone at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    request, first, end = find_query_block(block, query_start_loc, num_reqs, BLOCK_Q, ONE_BLOCK)
    if first >= end:
        return
    seq_len = tl.load(seq_lens + request)
    first_key, key_end, first_tile, last_tile = visible_tiles(first, end, seq_len, BLOCK_Q, BLOCK_N, WINDOW)
    # Tiles that every row of this block sees whole.
    whole_from = first_tile
    if WINDOW > 0:
        whole_from = tl.cdiv(tl.maximum(key_end - WINDOW, 0), BLOCK_N)
    whole_until = (first + seq_len - end + 1) // BLOCK_N
    if SPLIT:
        share = tl.cdiv(last_tile - first_tile, num_splits)
        first_tile += tl.program_id(2) * share
        last_tile = tl.minimum(first_tile + share, last_tile)
        if first_tile >= last_tile:
            return

    row = tl.arange(0, BLOCK_M)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < BLOCK_Q * GROUP) & (token < end)
    positions = token + seq_len - end
    dims = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (dims < HEAD_SIZE)[None, :]
    token = token.to(tl.int64)
    query_rows = token * stride_query_token + head * stride_query_head
    q = tl.load(query + query_rows[:, None] + dims[None, :], mask=mask, other=0.0)

    # Finite, so that a row which sees nothing of its first tiles does not become NaN; below any real score.
    row_max = tl.full([BLOCK_M], -1.0e30, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    kv_head_cache = kv_cache + kv_head.to(tl.int64) * stride_cache_head
    table_row = block_table + request.to(tl.int64) * stride_table

    # Three runs of tiles: 0, cut by the window; 1, seen whole by every row; 2, cut by causality. Run 1 does
    # without masks, which cost a prefill about as much as its softmax. A decode step is bound by memory: one
    # run, and so one filling of the load pipeline, is better.
    FIRST_RUN: tl.constexpr = 2 if BLOCK_M < 64 else (0 if WINDOW > 0 else 1)
    offsets = tl.arange(0, BLOCK_N)
    blocks = load_blocks(table_row, first_tile, first_key, key_end, BLOCK_SIZE, BLOCK_N)
    start = first_tile
    for run in tl.static_range(FIRST_RUN, 3):
        stop = last_tile
        if run == 0:
            stop = tl.minimum(tl.maximum(whole_from, start), last_tile)
        if run == 1:
            stop = tl.minimum(tl.maximum(whole_until, start), last_tile)
        for tile in range(start, stop):
            keys = tile * BLOCK_N + offsets
            # Only [first_key, key_end) is ever read: beyond it the cache may hold NaN and the table anything.
            readable = (keys >= first_key) & (keys < key_end)
            rows = blocks.to(tl.int64) * stride_cache_block + (keys % BLOCK_SIZE) * stride_cache_slot
            # Loaded a tile ahead: the compiler would spend stages of its pipeline on a load that others wait for.
            blocks = load_blocks(table_row, tile + 1, first_key, key_end, BLOCK_SIZE, BLOCK_N)
            k_pointers = kv_head_cache + rows[:, None] + dims[None, :]
            v_pointers = k_pointers + stride_cache_kv
            if run != 1:
                inside = readable[:, None] & (dims < HEAD_SIZE)[None, :]
                k = tl.load(k_pointers, mask=inside, other=0.0)
                v = tl.load(v_pointers, mask=inside, other=0.0)
            elif HEAD_SIZE < BLOCK_D:
                inside = (dims < HEAD_SIZE)[None, :]
                k = tl.load(k_pointers, mask=inside, other=0.0)
                v = tl.load(v_pointers, mask=inside, other=0.0)
            else:
                k = tl.load(k_pointers)
                v = tl.load(v_pointers)

            # Scores in units of log2, for exp2.
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * qk_scale
            if SOFT_CAP:
                # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both infinities.
                scores = soft_cap_log2 * (1 - 2 / (tl.exp(2 * scores) + 1))
            if run != 1:
                visible = keys[None, :] <= positions[:, None]
                if WINDOW > 0:
                    visible &= keys[None, :] > positions[:, None] - WINDOW
                scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            weights = tl.exp2(scores - new_max[:, None])
            decay = tl.exp2(row_max - new_max)
            row_sum = row_sum * decay + tl.sum(weights, 1)
            acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
            row_max = new_max
        start = stop

    # Rows without a query token see nothing, and in a split neither do rows whose window starts after it.
    seen = row_sum > 0
    row_sum = tl.where(seen, row_sum, 1.0)
    acc = acc / row_sum[:, None]
    if SPLIT:
        lse = tl.where(seen, row_max + tl.log2(row_sum), float("-inf"))
        partial = (token * NUM_HEADS + head) * num_splits + tl.program_id(2)
        tl.store(partial_out + partial[:, None] * HEAD_SIZE + dims[None, :], acc, mask=mask)
        tl.store(partial_lse + partial, lse, mask=real)
    else:
        out_rows = token * stride_out_token + head * stride_out_head
        tl.store(out + out_rows[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_reqs", "num_splits", "tokens_per_block"])
def reduce_kernel(
    partial_out,
    partial_lse,
    out,
    query_start_loc,
    seq_lens,
    num_reqs,
    num_splits,
    tokens_per_block,
    stride_out_token,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (query block x token in it, head): one row of `out` from the splits that had keys to see."""
    block = tl.program_id(0) // tokens_per_block
    head = tl.program_id(1)
    request, first, end = find_query_block(block, query_start_loc, num_reqs, BLOCK_Q, ONE_BLOCK)
    token = first + tl.program_id(0) % tokens_per_block
    if token >= end:
        return
    seq_len = tl.load(seq_lens + request)
    # The same shares as in the attention kernel; splits beyond `used` have written nothing.
    _, _, first_tile, last_tile = visible_tiles(first, end, seq_len, BLOCK_Q, BLOCK_N, WINDOW)
    used = tl.cdiv(last_tile - first_tile, tl.cdiv(last_tile - first_tile, num_splits))

    dims = tl.arange(0, BLOCK_D)
    row = (token.to(tl.int64) * NUM_HEADS + head) * num_splits
    top = -1.0e30
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for chunk in range(0, used, CHUNK):
        splits = chunk + tl.arange(0, CHUNK)
        lse = tl.load(partial_lse + row + splits, mask=splits < used, other=float("-inf"))
        mask = (splits < used)[:, None] & (dims < HEAD_SIZE)[None, :]
        part = tl.load(partial_out + (row + splits)[:, None] * HEAD_SIZE + dims, mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top)
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * part, 0)
        top = new_top
    out_row = out + token.to(tl.int64) * stride_out_token + head * stride_out_head
    tl.store(out_row + dims, (acc / total).to(out.dtype.element_ty), mask=dims < HEAD_SIZE)
