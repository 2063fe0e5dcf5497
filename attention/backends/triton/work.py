"""How a program finds its work on the device: a query block, the keys that it sees, and a split's share of them.

Nothing about a launch depends on a batch's content: each program looks into `query_start_loc` and `seq_lens`, or
leaves. A recorded launch is right for any batch of the same padded sizes.
"""

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
def rows_of_block(first, end, seq_len, kv_head, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr):
    """Token and query head of each row of a query block's tile, whether it is one of the block's, and its position."""
    row = tl.arange(0, BLOCK_M)
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    real = (row < BLOCK_Q * GROUP) & (token < end)
    return token, head, real, token + seq_len - end


@triton.jit
def visible_keys(first, end, seq_len, BLOCK_Q: tl.constexpr, WINDOW: tl.constexpr):
    """Keys that any row of a query block sees: [first_key, key_end)."""
    # Token t of a request is at position t + seq_len - end.
    key_end = tl.minimum(first + BLOCK_Q, end) + seq_len - end
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(first + seq_len - end - WINDOW + 1, 0)
    return first_key, key_end


@triton.jit
def whole_tiles(first, end, seq_len, key_end, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Where tiles of BLOCK_N keys start that every row of a query block sees whole: in [whole_from, whole_until)."""
    whole_from = 0
    if WINDOW > 0:
        whole_from = tl.cdiv(tl.maximum(key_end - WINDOW, 0), BLOCK_N) * BLOCK_N
    whole_until = (first + seq_len - end + 1) // BLOCK_N * BLOCK_N
    return whole_from, whole_until


@triton.jit
def share_of_split(first_key, key_end, split, num_splits, UNIT: tl.constexpr, SPLIT_KEYS: tl.constexpr):
    """Where the keys of one split of [first_key, key_end) start and stop, and how many splits have any.

    Shares are equal but for the last: multiples of UNIT keys, and at least SPLIT_KEYS. They start at multiples of
    UNIT, the first one a little before first_key. They follow from the true length, so that a short sequence in a
    launch for long ones is spread over the splits all the same.
    """
    start = first_key // UNIT * UNIT
    share = tl.maximum(tl.cdiv(key_end - start, num_splits), SPLIT_KEYS)
    share = tl.cdiv(share, UNIT) * UNIT
    used = tl.cdiv(key_end - start, share)
    start += split * share
    return start, tl.minimum(start + share, key_end), used
