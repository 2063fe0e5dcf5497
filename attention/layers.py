"""Modules that a model is built from: attention over a paged cache."""

from __future__ import annotations

import math

import torch
from torch import nn

from attention.base import AttentionSpec
from attention.ops import attention, write_kv_cache


class Attention(nn.Module):
    """Causal self-attention over a paged cache: writes this step's keys and values, then attends.

    The layer holds no state of its own: the runner binds a cache and a slot mapping before the first call. Both are
    buffers, so a compiled graph takes them as inputs and identical layers compile to identical code.

    scale: multiplies the scores, default 1 / sqrt(head_size). sliding_window, soft_cap: see `AttentionSpec`.
    """

    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        *,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_kv_heads or num_heads
        self.scale = scale if scale is not None else 1 / math.sqrt(head_size)
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.layer_name = ""
        self.register_buffer("kv_cache", torch.empty(0), persistent=False)
        self.register_buffer("slot_mapping", torch.empty(0, dtype=torch.int64), persistent=False)

    def get_spec(self, *, block_size: int, dtype: torch.dtype) -> AttentionSpec:
        """What this layer computes, for a cache of `block_size` tokens a block in `dtype`."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            block_size=block_size,
            dtype=dtype,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )

    def bind(self, layer_name: str, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Attach the layer's cache and the runner's slot buffer ([max_num_tokens] int64). Before the first call."""
        self.layer_name = layer_name
        self.kv_cache = kv_cache
        self.slot_mapping = slot_mapping

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [T, num_heads * head_size] or [T, num_heads, head_size]; key, value likewise with num_kv_heads.

        Returns a tensor of query's shape and dtype. Rows of padded tokens are undefined.
        """
        shape = query.shape
        query = query.view(-1, self.num_heads, self.head_size)
        key = key.view(-1, self.num_kv_heads, self.head_size)
        value = value.view(-1, self.num_kv_heads, self.head_size)
        out = torch.empty_like(query)
        write_kv_cache(key, value, self.kv_cache, self.slot_mapping)
        attention(query, self.kv_cache, out, self.layer_name)
        return out.view(shape)


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """The `Attention` layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
