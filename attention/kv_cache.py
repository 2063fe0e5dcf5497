"""The tensors behind the cache specs: paged caches, found by block, and states, found by a request's slot."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attention.specs import LayerSpec


def block_bytes(specs: Mapping[str, LayerSpec]) -> int:
    """Bytes that one block takes over all layers."""
    return sum(c.num_bytes for spec in specs.values() for c in spec.caches().values() if c.per == "block")


def state_bytes(specs: Mapping[str, LayerSpec]) -> int:
    """Bytes that one request's states take over all layers."""
    return sum(c.num_bytes for spec in specs.values() for c in spec.caches().values() if c.per == "request")


def allocate_caches(
    specs: Mapping[str, LayerSpec], *, num_blocks: int, num_slots: int, device: torch.device
) -> dict[str, dict[str, torch.Tensor]]:
    """Layer name to its caches by name, zeroed: [num_blocks + 1 or num_slots, *shape] each.

    The last block is nobody's: padded tokens may write there (see `attention.cache_writes`).
    """
    count = {"block": num_blocks + 1, "request": num_slots}
    return {
        layer: {
            name: torch.zeros(count[cache.per], *cache.shape, dtype=cache.dtype, device=device)
            for name, cache in spec.caches().items()
        }
        for layer, spec in specs.items()
    }
