"""The contract of an attention backend: what it supports, what it builds, what it runs.

A backend is three small things: a class of facts (`AttentionBackend`), a builder of per-step metadata
(`MetadataBuilder`) and the computation itself (`AttentionImpl`). Nothing here knows about CUDA graphs beyond one word,
`for_capture`: whether the metadata being built will be baked into a recorded graph.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from attention.metadata import CommonAttentionMetadata

MetadataT = TypeVar("MetadataT")


class AttentionCGSupport(enum.IntEnum):
    """Which batches a backend's kernels can be recorded for, from the least to the most."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Every request decodes exactly one token."""
    UNIFORM_BATCH = 2
    """Every request has the same query length (speculative decoding included)."""
    ALWAYS = 3
    """Any mix of prefill, chunked prefill and decode."""


class UncapturableMetadata(RuntimeError):
    """A builder was asked for metadata that it cannot bake into a graph. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What one attention layer computes; equal specs share a builder.

    `sliding_window` counts the key positions a query sees, itself included; `soft_cap` c bounds the scaled scores by
    c * tanh(score / c) (Gemma 2, https://arxiv.org/abs/2408.00118, section 2).
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1 or None, got {self.sliding_window}")

    @property
    def kv_cache_shape_per_block(self) -> tuple[int, int, int, int]:
        """(2, block_size, num_kv_heads, head_size): keys at index 0, values at index 1."""
        return (2, self.block_size, self.num_kv_heads, self.head_size)


class MetadataBuilder(ABC, Generic[MetadataT]):
    """Turns the neutral facts of one batch into what the backend's kernel reads.

    A builder owns its persistent device buffers and writes into them in place, so that a graph recorded over one
    step's metadata reads the next step's values.
    """

    cudagraph_support: ClassVar[AttentionCGSupport]

    def __init__(
        self, spec: AttentionSpec, *, max_num_reqs: int, max_num_tokens: int, max_model_len: int, device: torch.device
    ) -> None:
        self.spec = spec
        self.max_num_reqs = max_num_reqs
        self.max_num_tokens = max_num_tokens
        self.max_model_len = max_model_len
        self.device = device

    def get_cudagraph_support(self) -> AttentionCGSupport:
        """The support level of the kernel that this builder's spec really leads to."""
        return self.cudagraph_support

    @abstractmethod
    def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> MetadataT:
        """Metadata of one batch.

        `for_capture` is true exactly when a recorded graph will read the result; a builder that cannot give such
        metadata for this batch raises `UncapturableMetadata`.
        """


class AttentionImpl(ABC, Generic[MetadataT]):
    """The computation of one attention group, shared by its layers."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @abstractmethod
    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: MetadataT, out: torch.Tensor) -> None:
        """Causal attention of each request's new tokens over its whole cached sequence, written to `out`.

        query, out: [num_tokens, num_heads, head_size] in the layer's dtype; rows past the batch's true tokens are
        left as they are. kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size]; the new tokens' keys and
        values are already in it.
        """


class AttentionBackend(ABC):
    """Facts about one backend. Never instantiated; registered by name in `attention.registry`."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Why this backend cannot run `spec` on `device`; None when it can."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[MetadataBuilder[Any]]:
        """The builder's class."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]:
        """The computation's class."""
