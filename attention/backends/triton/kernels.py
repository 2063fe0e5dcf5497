"""The attention kernel, which also merges its splits of the KV axis, or leaves that to a kernel of its own.

With SPLIT, a program does its share of the keys. Its normalised result goes to partial_out [token, head, split,
HEAD_SIZE] fp32, with the log2 of the softmax's denominator in partial_lse [token, head, split] fp32. With MERGE, the
last of a block's splits to arrive, as counted in arrivals [query block, KV head] int32, merges them; the counts are
zero before and after every launch. Where one split has all the keys, it writes `out` itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.backends.triton.merge import merge_rows
from attention.backends.triton.work import find_query_block, rows_of_block, share_of_split, visible_keys, whole_tiles
from attention.kernels.overlap import follow_predecessor


@triton.jit
def load_blocks(table_row, start, first_key, key_end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Physical blocks of the tile of keys from `start`: one for all of it where it lies within a block, else one a
    key, and then the tile starts at the start of a block.

    Only entries with a key in [first_key, key_end) are read, the others are 0.
    """
    if BLOCK_N <= BLOCK_SIZE:
        return tl.load(table_row + start // BLOCK_SIZE, mask=start < key_end, other=0)
    else:
        offsets = tl.arange(0, BLOCK_N)
        readable = (start + offsets >= first_key) & (start + offsets < key_end)
        # Nothing is divided a key: the loop's part is a scalar, the other does not change in it.
        return tl.load(table_row + start // BLOCK_SIZE + offsets // BLOCK_SIZE, mask=readable, other=0)


@triton.jit
def load_rows(pointers, readable, dims, MASKED: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile of keys or values: `readable` rows of it where MASKED, else all of them."""
    if MASKED:
        inside = readable[:, None] & (dims < HEAD_SIZE)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    elif HEAD_SIZE < BLOCK_D:
        return tl.load(pointers, mask=(dims < HEAD_SIZE)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def log2_scores(q, k, qk_scale, soft_cap_log2, SOFT_CAP: tl.constexpr):
    """Scores in units of log2, for exp2."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * qk_scale
    if SOFT_CAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), right at both infinities.
        scores = soft_cap_log2 * (1 - 2 / (tl.exp(2 * scores) + 1))
    return scores


@triton.jit
def attend_tile(
    q, k, v, keys, positions, key_end, qk_scale, soft_cap_log2, row_max, row_sum, acc,
    MASKED: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: row_max, row_sum and acc with a tile of keys and values. MASKED: some row does
    not see some of the keys."""
    scores = log2_scores(q, k, qk_scale, soft_cap_log2, SOFT_CAP)
    if MASKED:
        visible = keys[None, :] <= positions[:, None]
        if SPLIT:
            visible &= (keys < key_end)[None, :]
        if WINDOW > 0:
            visible &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def attend_keys(
    q, positions, cache, table_row, blocks, start, first_key, key_end, whole_from, whole_until, dims, qk_scale,
    soft_cap_log2, stride_cache_block, stride_cache_kv, stride_cache_slot,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, UNIT: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attention of each row to the keys of [start, key_end) that it sees: the result, and the log2 of the softmax's
    denominator.

    cache: of one KV head. blocks: of the tile from `start`. Tiles start at multiples of UNIT: of BLOCK_N, for the sake
    of the runs below, or for a decode step of BLOCK_SIZE.
    """
    # Finite, so that a row which sees nothing of its first tiles does not become NaN; below any real score.
    row_max = tl.full([BLOCK_M], -1.0e30, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Three runs of tiles: 0, cut by the window; 1, seen whole by every row; 2, cut by causality. Run 1 does
    # without masks, which cost a prefill about as much as its softmax. A decode step is bound by memory: one
    # run, and so one filling of the load pipeline, is better.
    FIRST_RUN: tl.constexpr = 2 if BLOCK_M < 64 else (0 if WINDOW > 0 else 1)
    tl.static_assert(FIRST_RUN == 2 or UNIT == BLOCK_N)
    offsets = tl.arange(0, BLOCK_N)
    in_block = (offsets % BLOCK_SIZE) * stride_cache_slot
    for run in tl.static_range(FIRST_RUN, 3):
        stop = key_end
        if run == 0:
            stop = tl.minimum(tl.maximum(whole_from, start), key_end)
        if run == 1:
            stop = tl.minimum(tl.maximum(whole_until, start), key_end)
        for tile in range(start, stop, BLOCK_N):
            keys = tile + offsets
            # Only [first_key, key_end) is ever read: beyond it the cache may hold NaN and the table anything.
            readable = (keys >= first_key) & (keys < key_end)
            rows = blocks.to(tl.int64) * stride_cache_block + in_block
            if BLOCK_N < BLOCK_SIZE:
                rows += tile % BLOCK_SIZE * stride_cache_slot
            # Loaded a tile ahead: the compiler would spend stages of its pipeline on a load that others wait for.
            blocks = load_blocks(table_row, tile + BLOCK_N, first_key, key_end, BLOCK_SIZE, BLOCK_N)
            k_pointers = cache + rows[:, None] + dims[None, :]
            v_pointers = k_pointers + stride_cache_kv
            k = load_rows(k_pointers, readable, dims, run != 1, HEAD_SIZE, BLOCK_D)
            v = load_rows(v_pointers, readable, dims, run != 1, HEAD_SIZE, BLOCK_D)
            row_max, row_sum, acc = attend_tile(
                *(q, k, v, keys, positions, key_end, qk_scale, soft_cap_log2, row_max, row_sum, acc),
                *(run != 1, SPLIT, WINDOW, SOFT_CAP),
            )
        start = stop

    # Rows without a query token see nothing, and in a split neither do rows whose window starts after it.
    seen = row_sum > 0
    row_sum = tl.where(seen, row_sum, 1.0)
    return acc / row_sum[:, None], tl.where(seen, row_max + tl.log2(row_sum), float("-inf"))


@triton.jit
def merge_if_last(
    block, first, end, kv_head, used, num_splits, arrivals, partial_out, partial_lse, out, stride_out_token,
    stride_out_head,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_SPLITS: tl.constexpr,
):  # fmt: skip
    """Count this split's arrival; the last of the `used` ones merges them all."""
    # The barrier orders every thread's stores before the increment, which one thread does: whoever counts it
    # (release, acquire) also sees them.
    tl.debug_barrier()
    arrived = arrivals + block * tl.num_programs(1) + kv_head
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == used - 1:
        tl.store(arrived, 0)  # for the next launch
        num_rows = tl.minimum(end - first, BLOCK_Q) * GROUP
        for first_row in tl.range(0, num_rows, MERGE_ROWS, num_stages=1):
            merge_rows(
                *(first_row, num_rows, first, kv_head, partial_out, partial_lse, out, num_splits, used),
                *(stride_out_token, stride_out_head),
                *(NUM_HEADS, GROUP, HEAD_SIZE, BLOCK_D, MERGE_ROWS, MERGE_SPLITS),
            )


@triton.jit(do_not_specialize=["num_reqs", "num_splits"])
def attention_kernel(
    query, kv_cache, out, partial_out, partial_lse, arrivals, query_start_loc, seq_lens, block_table, num_reqs,
    num_splits, qk_scale, soft_cap_log2,
    stride_query_token, stride_query_head, stride_out_token, stride_out_head, stride_cache_block, stride_cache_kv,
    stride_cache_slot, stride_cache_head, stride_table,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ONE_BLOCK: tl.constexpr, UNIT: tl.constexpr, SPLIT: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, MERGE: tl.constexpr, MERGE_ROWS: tl.constexpr, MERGE_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Program (query block, KV head, split): BLOCK_Q tokens of one request, all query heads of one KV head.

    Row r of the tile is token r // GROUP, query head r % GROUP. qk_scale takes a raw score to log2 units, or with
    SOFT_CAP to multiples of the cap, which soft_cap_log2 takes to log2 units. WINDOW 0: none. SPLIT, MERGE: see above.
    """
    # Later blocks of a prefill see more keys: the longest first, so that none runs on alone at the end.
    block, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    request, first, end = find_query_block(block, query_start_loc, num_reqs, BLOCK_Q, ONE_BLOCK)
    # Before the branch: its latency is that of the loads which the branch waits for.
    seq_len = tl.load(seq_lens + request)
    if OVERLAP:
        # What is loaded above was there before the kernel that makes the query: see attention/kernels/overlap.py.
        follow_predecessor()
    if first >= end:
        return
    first_key, key_end = visible_keys(first, end, seq_len, BLOCK_Q, WINDOW)
    whole_from, whole_until = whole_tiles(first, end, seq_len, key_end, BLOCK_N, WINDOW)
    start, used = first_key // UNIT * UNIT, 1
    if SPLIT:
        start, key_end, used = share_of_split(first_key, key_end, tl.program_id(2), num_splits, UNIT, SPLIT_KEYS)
        if start >= key_end:
            return
    token, head, real, positions = rows_of_block(first, end, seq_len, kv_head, GROUP, BLOCK_Q, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (dims < HEAD_SIZE)[None, :]
    token = token.to(tl.int64)
    cache = kv_cache + kv_head.to(tl.int64) * stride_cache_head
    table_row = block_table + request.to(tl.int64) * stride_table
    blocks = load_blocks(table_row, start, first_key, key_end, BLOCK_SIZE, BLOCK_N)
    query_rows = token * stride_query_token + head * stride_query_head
    q = tl.load(query + query_rows[:, None] + dims[None, :], mask=mask, other=0.0)
    acc, lse = attend_keys(
        *(q, positions, cache, table_row, blocks, start, first_key, key_end, whole_from, whole_until, dims, qk_scale),
        *(soft_cap_log2, stride_cache_block, stride_cache_kv, stride_cache_slot),
        *(HEAD_SIZE, BLOCK_D, BLOCK_SIZE, BLOCK_M, BLOCK_N, WINDOW, SOFT_CAP, UNIT, SPLIT),
    )
    if used == 1:
        out_rows = token * stride_out_token + head * stride_out_head
        tl.store(out + out_rows[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=mask)
    elif SPLIT:
        partial = (token * NUM_HEADS + head) * num_splits + tl.program_id(2)
        tl.store(partial_out + partial[:, None] * HEAD_SIZE + dims[None, :], acc, mask=mask)
        tl.store(partial_lse + partial, lse, mask=real)
        if MERGE:
            merge_if_last(
                *(block, first, end, kv_head, used, num_splits, arrivals, partial_out, partial_lse, out),
                *(stride_out_token, stride_out_head, NUM_HEADS, GROUP, HEAD_SIZE, BLOCK_D, BLOCK_Q),
                *(MERGE_ROWS, MERGE_SPLITS),
            )
