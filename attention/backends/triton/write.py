"""Scatter of new rows into paged caches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def write_kernel(
    key,
    value,
    kv_cache,
    slot_mapping,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_cache_block,
    stride_cache_kv,
    stride_cache_slot,
    stride_cache_head,
    WIDTH: tl.constexpr,  # num_kv_heads * head_size
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (token, part): elements [part * BLOCK, (part + 1) * BLOCK) of one token's keys and values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < WIDTH
    head, dim = element // HEAD_SIZE, element % HEAD_SIZE
    key_row = tl.load(key + token * stride_key_token + head * stride_key_head + dim, mask=inside)
    value_row = tl.load(value + token * stride_value_token + head * stride_value_head + dim, mask=inside)
    target = kv_cache + (slot // BLOCK_SIZE) * stride_cache_block + (slot % BLOCK_SIZE) * stride_cache_slot
    target += head * stride_cache_head + dim
    tl.store(target, key_row.to(kv_cache.dtype.element_ty), mask=inside)
    tl.store(target + stride_cache_kv, value_row.to(kv_cache.dtype.element_ty), mask=inside)


def write_kv_cache(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write each token's key and value to its slot; a slot of -1 writes nothing.

    key, value: [num_tokens, num_kv_heads, head_size], any strides with the last dimension contiguous (slices
    of a fused projection). kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size]. slot_mapping:
    [>= num_tokens] integer, block * block_size + offset. All on one device.
    """
    num_tokens, num_kv_heads, head_size = key.shape
    if key.stride(2) != 1 or value.stride(2) != 1 or kv_cache.stride(4) != 1:
        raise ValueError(
            "write_kv_cache needs contiguous head dimensions, got strides "
            f"key {key.stride()}, value {value.stride()}, kv_cache {kv_cache.stride()}; call .contiguous()"
        )
    if num_tokens == 0:
        return
    width = num_kv_heads * head_size
    block = min(triton.next_power_of_2(width), 2048)
    write_kernel[(num_tokens, triton.cdiv(width, block))](
        key,
        value,
        kv_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        WIDTH=width,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=kv_cache.shape[2],
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def write_rows_kernel(
    value,
    cache,
    slot_mapping,
    stride_value,
    stride_cache_block,
    stride_cache_slot,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (token, part): elements [part * BLOCK, (part + 1) * BLOCK) of one token's row."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(value + token * stride_value + element, mask=element < WIDTH)
    target = cache + (slot // BLOCK_SIZE) * stride_cache_block + (slot % BLOCK_SIZE) * stride_cache_slot
    tl.store(target + element, row.to(cache.dtype.element_ty), mask=element < WIDTH)


def write_cache(value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write each token's row to its slot; a slot of -1 writes nothing.

    value: [num_tokens, ...], any strides with the last dimension contiguous. cache: [num_blocks, block_size, ...],
    each row contiguous. slot_mapping: [>= num_tokens] integer, block * block_size + offset. All on one device.
    """
    num_tokens = value.shape[0]
    if num_tokens == 0:
        return
    rows, paged = value.reshape(num_tokens, -1), cache.view(*cache.shape[:2], -1)
    if rows.stride(1) != 1 or paged.stride(2) != 1:
        raise ValueError(
            "write_cache needs contiguous rows, got strides "
            f"value {value.stride()}, cache {cache.stride()}; call .contiguous()"
        )
    width = rows.shape[1]
    block = min(triton.next_power_of_2(width), 2048)
    write_rows_kernel[(num_tokens, triton.cdiv(width, block))](
        rows,
        paged,
        slot_mapping,
        rows.stride(0),
        paged.stride(0),
        paged.stride(1),
        WIDTH=width,
        BLOCK_SIZE=cache.shape[1],
        BLOCK=block,
        num_warps=4,
    )
