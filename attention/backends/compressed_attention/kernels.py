"""The kernel of compressed attention.

The grid depends on sizes alone: each program finds its request and its keys on the device, or leaves, so a recorded
launch is right for any batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.specs import CompressedAttentionSpec

if TYPE_CHECKING:
    from attention.backends.compressed_attention.backend import CompressedAttentionMetadata

_LOG2_E = math.log2(math.e)
_TILE = 8192
"""Elements of a program's queries: 16 heads of size 512."""


@triton.jit
def load_rows(
    cache,
    table_row,
    index,
    visible,
    dims,
    stride_block,
    stride_row,
    PER_BLOCK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Rows of a paged cache by logical index, and 0 where they are not visible: nothing else is read."""
    block = tl.load(table_row + index // PER_BLOCK, mask=visible, other=0).to(tl.int64)
    rows = block * stride_block + (index % PER_BLOCK) * stride_row
    mask = visible[:, None] & (dims < HEAD_SIZE)[None, :]
    return tl.load(cache + rows[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def attend(q, k, visible, scale_log2, row_max, row_sum, acc):
    """One step of the online softmax over keys that are also the values."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    scores = tl.where(visible[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    acc = tl.dot(weights.to(k.dtype), k, acc * decay[:, None], input_precision="ieee")
    return new_max, row_sum * decay + tl.sum(weights, 1), acc


@triton.jit
def compressed_attention_kernel(
    query, local_cache, compressed_cache, block_table, token_request, query_start_loc, seq_lens, out, scale_log2,
    stride_query_token, stride_query_head, stride_out_token, stride_out_head, stride_local_block, stride_local_row,
    stride_compressed_block, stride_compressed_row, stride_table,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PER_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, RATIO: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (token, heads): first the latents in the window, then the entries complete at the token's position."""
    token = tl.program_id(0)
    request = tl.load(token_request + token)
    if request < 0:
        return
    position = tl.load(seq_lens + request) - (tl.load(query_start_loc + request + 1) - token)
    table_row = block_table + request.to(tl.int64) * stride_table

    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    mask = (head < NUM_HEADS)[:, None] & (dims < HEAD_SIZE)[None, :]
    query_rows = query + token.to(tl.int64) * stride_query_token + head * stride_query_head
    q = tl.load(query_rows[:, None] + dims[None, :], mask=mask, other=0.0)

    row_max = tl.full([BLOCK_H], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    offsets = tl.arange(0, BLOCK_N)
    # Every tile has a visible key, so row_max is finite after the first.
    for start in range(tl.maximum(position - WINDOW + 1, 0), position + 1, BLOCK_N):
        visible = start + offsets <= position
        k = load_rows(
            local_cache,
            table_row,
            start + offsets,
            visible,
            dims,
            stride_local_block,
            stride_local_row,
            BLOCK_SIZE,
            HEAD_SIZE,
        ).to(q.dtype)
        row_max, row_sum, acc = attend(q, k, visible, scale_log2, row_max, row_sum, acc)
    num_entries = (position + 1) // RATIO
    for start in range(0, num_entries, BLOCK_N):
        visible = start + offsets < num_entries
        k = load_rows(
            compressed_cache,
            table_row,
            start + offsets,
            visible,
            dims,
            stride_compressed_block,
            stride_compressed_row,
            PER_BLOCK,
            HEAD_SIZE,
        ).to(q.dtype)
        row_max, row_sum, acc = attend(q, k, visible, scale_log2, row_max, row_sum, acc)

    out_rows = out + token.to(tl.int64) * stride_out_token + head * stride_out_head
    tl.store(out_rows[:, None] + dims[None, :], (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=mask)


def compressed_attention(
    query: torch.Tensor,
    local_cache: torch.Tensor,
    compressed_cache: torch.Tensor,
    metadata: CompressedAttentionMetadata,
    out: torch.Tensor,
    spec: CompressedAttentionSpec,
) -> None:
    """See `CompressedAttentionImpl.forward`. Accumulated in fp32. All on one CUDA device; any strides, with last
    dimensions contiguous."""
    num_tokens, num_heads, head_size = query.shape
    block_table = metadata.block_table
    tensors = {"query": query, "local_cache": local_cache, "compressed_cache": compressed_cache, "out": out}
    strided = {name: tensor.stride() for name, tensor in tensors.items() if tensor.stride(-1) != 1}
    if strided or block_table.stride(1) != 1:
        raise ValueError(
            "compressed_attention needs contiguous last dimensions, got strides "
            f"{strided}, block_table {block_table.stride()}; call .contiguous()"
        )
    if num_tokens == 0:
        return
    # A matrix product takes 16 rows at least. Exact fp32 has no tensor cores: its operands are in registers.
    single = query.dtype == torch.float32
    block_d = max(16, triton.next_power_of_2(head_size))
    most_heads = 16 if single else max(16, min(64, _TILE // block_d))
    block_h = min(most_heads, max(16, triton.next_power_of_2(num_heads)))
    compressed_attention_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        *(query, local_cache, compressed_cache),
        *(block_table, metadata.token_request, metadata.query_start_loc, metadata.seq_lens),
        out,
        spec.scale * _LOG2_E,
        *query.stride()[:2],
        *out.stride()[:2],
        *local_cache.stride()[:2],
        *compressed_cache.stride()[:2],
        block_table.stride(0),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=local_cache.shape[1],
        PER_BLOCK=compressed_cache.shape[1],
        WINDOW=spec.window,
        RATIO=spec.ratio,
        BLOCK_H=block_h,
        BLOCK_N=16 if single else 32,
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=2,
    )
