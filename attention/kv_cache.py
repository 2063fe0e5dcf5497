"""Paged key/value caches: how large a block is, and the tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attention.base import AttentionSpec


def block_bytes(specs: Mapping[str, AttentionSpec]) -> int:
    """Bytes that one block takes over all layers."""
    total = 0
    for spec in specs.values():
        elements = 1
        for size in spec.kv_cache_shape_per_block:
            elements *= size
        total += elements * spec.dtype.itemsize
    return total


def allocate_kv_caches(
    specs: Mapping[str, AttentionSpec], num_blocks: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """One zeroed [num_blocks, 2, block_size, num_kv_heads, head_size] cache per layer, in the layer's dtype."""
    return {
        name: torch.zeros(num_blocks, *spec.kv_cache_shape_per_block, dtype=spec.dtype, device=device)
        for name, spec in specs.items()
    }
