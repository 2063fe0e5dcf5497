"""What a layer with caches computes, and which caches it needs. Equal specs share a builder."""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """One cache of a layer: a tensor [number of blocks or requests, *shape]."""

    per: Literal["block", "request"]
    """"block": paged, found through the block table. "request": one state for each running request, found by its
    state slot."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one block, or of one request's state."""
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec(ABC):
    """Facts about one kind of layer that keeps caches.

    Per-request states are addressed by position (modulo their length), and long enough that the states which a step
    reads survive the rejected draft tokens of the step before: nothing has to be rolled back.
    """

    kind: ClassVar[str]
    """The name under which backends for such layers are registered."""
    in_piece: ClassVar[bool] = False
    """Whether its operator belongs into the pieces; else the operator is a breakpoint."""
    operator: ClassVar[str] = ""
    """ "namespace::name" of the operator: what a graph is split at, should its metadata not be capturable."""

    block_size: int
    """Tokens of one cache block."""
    dtype: torch.dtype

    @abstractmethod
    def caches(self) -> Mapping[str, CacheSpec]:
        """The caches by the name of the layer's buffer that holds each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(LayerSpec):
    """Causal attention over a paged cache of keys and values.

    `sliding_window` counts the key positions a query sees, itself included; `soft_cap` c bounds the scaled scores by
    c * tanh(score / c) (Gemma 2, https://arxiv.org/abs/2408.00118, section 2).
    """

    kind: ClassVar[str] = "attention"
    operator: ClassVar[str] = "mrv2::attention"

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        check_at_least(1, head_size=self.head_size, sliding_window=self.sliding_window)
        check_scale(self.scale)
        if self.soft_cap is not None and not 0 < self.soft_cap < math.inf:
            raise ValueError(f"soft_cap must be finite and above 0, or None for none, got {self.soft_cap}")

    def caches(self) -> Mapping[str, CacheSpec]:
        """kv_cache [num_blocks, 2, block_size, num_kv_heads, head_size]: keys at index 0, values at index 1."""
        shape = (2, self.block_size, self.num_kv_heads, self.head_size)
        return {"kv_cache": CacheSpec(per="block", shape=shape, dtype=self.dtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(LayerSpec):
    """Causal depthwise convolution over the last `kernel_size` tokens of a request."""

    kind: ClassVar[str] = "short_conv"
    in_piece: ClassVar[bool] = True
    operator: ClassVar[str] = "mrv2::short_conv"

    dim: int
    kernel_size: int
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, dim=self.dim)
        check_at_least(2, kernel_size=self.kernel_size)

    def caches(self) -> Mapping[str, CacheSpec]:
        """conv_state [num_slots, R, dim]: the input at position p lies at p % R."""
        shape = (self.kernel_size - 1 + self.num_draft_tokens, self.dim)
        return {"conv_state": CacheSpec(per="request", shape=shape, dtype=self.dtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCompressorSpec(LayerSpec):
    """Every window of `ratio` tokens becomes one entry of a compressed cache."""

    kind: ClassVar[str] = "kv_compressor"
    in_piece: ClassVar[bool] = True
    operator: ClassVar[str] = "mrv2::compress_kv"

    dim: int
    ratio: int
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, dim=self.dim)
        check_at_least(2, ratio=self.ratio)
        if self.block_size % self.ratio:
            raise ValueError(
                f"block_size must be a multiple of the compression ratio, got {self.block_size} and {self.ratio}"
            )

    def caches(self) -> Mapping[str, CacheSpec]:
        """compressed_cache [num_blocks, block_size // ratio, dim]: entry e of a request lies in its logical block
        e // (block_size // ratio). window_state [num_slots, R, 2, dim]: (kv, score) at position p lie at p % R."""
        entries = (self.block_size // self.ratio, self.dim)
        window = (self.ratio - 1 + self.num_draft_tokens, 2, self.dim)
        return {
            "compressed_cache": CacheSpec(per="block", shape=entries, dtype=self.dtype),
            "window_state": CacheSpec(per="request", shape=window, dtype=torch.float32),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionSpec(LayerSpec):
    """Causal attention over a local window of latents and the compressed entries of everything before.

    All heads share one latent per position, which is key and value at once.
    """

    kind: ClassVar[str] = "compressed_attention"
    operator: ClassVar[str] = "mrv2::compressed_attention"

    num_heads: int
    head_size: int
    scale: float
    window: int
    ratio: int

    def __post_init__(self) -> None:
        check_at_least(1, num_heads=self.num_heads, head_size=self.head_size, window=self.window)
        check_scale(self.scale)

    def caches(self) -> Mapping[str, CacheSpec]:
        """local_cache [num_blocks, block_size, head_size]."""
        return {"local_cache": CacheSpec(per="block", shape=(self.block_size, self.head_size), dtype=self.dtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionSpec(LayerSpec):
    """The gated delta rule (https://arxiv.org/abs/2412.06464, equation 10), with a recurrent state per request."""

    kind: ClassVar[str] = "linear_attention"
    operator: ClassVar[str] = "mrv2::linear_attention"

    num_k_heads: int
    num_v_heads: int
    head_k_size: int
    head_v_size: int
    scale: float
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, num_k_heads=self.num_k_heads, head_k_size=self.head_k_size, head_v_size=self.head_v_size)
        check_scale(self.scale)
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"num_v_heads must be a multiple of num_k_heads, got {self.num_v_heads} and {self.num_k_heads}"
            )

    @property
    def num_states(self) -> int:
        """States kept for each request: one after each token that a decode step may have."""
        return 1 + self.num_draft_tokens

    def caches(self) -> Mapping[str, CacheSpec]:
        """recurrent_state [num_slots, num_states, num_v_heads, head_k_size, head_v_size] fp32: the state after the
        token at position p lies at p % num_states."""
        shape = (self.num_states, self.num_v_heads, self.head_k_size, self.head_v_size)
        return {"recurrent_state": CacheSpec(per="request", shape=shape, dtype=torch.float32)}


def check_at_least(least: int, **values: int | None) -> None:
    """ValueError for a value that is no integer, or below `least`; None passes."""
    for name, value in values.items():
        if value is not None and not (isinstance(value, numbers.Integral) and value >= least):
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_scale(scale: float) -> None:
    """ValueError for a factor of the scores that is not finite, or not above 0."""
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be finite and above 0, got {scale}")
