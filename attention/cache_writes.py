"""Cache writes as plain tensor operations, which a compiler fuses with whatever computes keys and values.

The operators of `attention.ops` decide row by row that a padded token, of slot -1, writes nothing. Here such a row
writes to the last entry of the last block, -1 counted from the end: caches have one block more than is handed out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def write_kv_cache(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """As `attention.ops.write_kv_cache`, both at once. kv_cache has a last block that is nobody's."""
    block, offset = _place(slot_mapping[: key.shape[0]], kv_cache.shape[2])
    both = torch.stack([key, value]).to(kv_cache.dtype)
    which = torch.arange(2, device=kv_cache.device)[:, None]
    kv_cache[block[None], which, offset[None]] = both


def write_cache(value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """As `attention.ops.write_cache`. cache has a last block that is nobody's."""
    block, offset = _place(slot_mapping[: value.shape[0]], cache.shape[1])
    cache[block, offset] = value.to(cache.dtype)


def _place(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(block, offset in it) of each slot; (-1, -1) counted from the end for slot -1."""
    return slots // block_size, slots % block_size


AS_PARTS: dict[str, Callable[..., Any]] = {"mrv2::write_kv_cache": write_kv_cache, "mrv2::write_cache": write_cache}
"""Operator to the function that does the same with tensor operations."""
