"""The attention operators as a compiled graph sees them: schema, fake, and dispatch through the forward context.

Registered through `torch.library.Library`, whose call costs a fraction of `torch.library.custom_op`'s.
"""

from __future__ import annotations

import importlib

import torch

from attention.forward_context import get_forward_context

PAD_SLOT = -1
"""Slot of a padded token: nothing is written for it."""

_library = torch.library.Library("mrv2", "DEF")
_library.define("attention(Tensor query, Tensor kv_cache, Tensor(a!) out, str layer) -> ()")
_library.define("write_kv_cache(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()")


def _attention(query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, layer: str) -> None:
    context = get_forward_context()
    context.impls[layer].forward(query, kv_cache, context.metadata[layer], out)


def _write_kv_cache_torch(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    slots = slot_mapping[: key.shape[0]]
    real = slots >= 0
    slots = slots[real]
    block, offset = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    kv_cache[block, 0, offset] = key[real].to(kv_cache.dtype)
    kv_cache[block, 1, offset] = value[real].to(kv_cache.dtype)


def _write_kv_cache_cuda(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    # Boolean selection synchronises on a GPU, so the kernel decides row by row. Imported late: Triton is optional.
    kernels = importlib.import_module("attention.backends.triton")
    kernels.write_kv_cache(key, value, kv_cache, slot_mapping)


def _nothing(*_: object) -> None:
    """Both operators only write into their arguments, so their fakes do nothing."""


_library.impl("attention", _attention, "CPU")
_library.impl("attention", _attention, "CUDA")
_library.impl("attention", _nothing, "Meta")
_library.impl("write_kv_cache", _write_kv_cache_torch, "CPU")
_library.impl("write_kv_cache", _write_kv_cache_cuda, "CUDA")
_library.impl("write_kv_cache", _nothing, "Meta")

attention = torch.ops.mrv2.attention
"""attention(query [T, num_heads, d], kv_cache, out! [T, num_heads, d], layer): see `AttentionImpl.forward`."""
write_kv_cache = torch.ops.mrv2.write_kv_cache
"""write_kv_cache(key [T, num_kv_heads, d], value, kv_cache!, slot_mapping [>= T] int64): one token a slot, -1 none."""
