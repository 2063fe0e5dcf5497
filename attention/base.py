"""The contract of an attention backend: what it supports, what it builds, what it runs.

A backend is three small things: a class of facts (`AttentionBackend`), a builder of per-step metadata
(`MetadataBuilder`) and the computation itself (`AttentionImpl`). Nothing here knows about CUDA graphs beyond one word,
`for_capture`: whether the metadata being built will be baked into a recorded graph.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch

from attention.specs import AttentionSpec

if TYPE_CHECKING:
    from attention.kernels.ahead import Launch
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


class MetadataBuilder(ABC, Generic[MetadataT]):
    """Turns the neutral facts of one batch into what the backend's kernel reads.

    A builder owns its persistent device buffers and writes into them in place, so that a graph recorded over one
    step's metadata reads the next step's values.
    """

    cudagraph_support: ClassVar[AttentionCGSupport]

    advances_on_device: ClassVar[bool] = False
    """Whether recorded decode metadata stays right when sequence lengths, positions and slots are advanced in the
    runner's device buffers by some tokens, without a new build: kernels read them there, up to the maximal length."""
    unrecorded_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of the metadata that no recorded kernel reads: they may change between capture and replay."""

    def __init__(
        self, spec: Any, *, max_num_reqs: int, max_num_tokens: int, max_model_len: int, device: torch.device
    ) -> None:
        """`spec`: the `LayerSpec` of the group's layers."""
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
    """The computation of one group of attention layers, shared by them."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    @abstractmethod
    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: MetadataT, out: torch.Tensor) -> None:
        """Causal attention of each request's new tokens over its whole cached sequence, written to `out`.

        query, out: [num_tokens, num_heads, head_size] in the layer's dtype; rows past the batch's true tokens are
        left as they are. kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size]; the new tokens' keys and
        values are already in it.
        """

    def bind(self, query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> Callable[[MetadataT], None]:
        """`forward` on tensors that will always be these, for an operator that runs between recorded graphs: called
        with each step's metadata. A backend overrides it where that saves host time."""
        return lambda metadata: self.forward(query, kv_cache, metadata, out)

    def launches_ahead(
        self,
        builder: Any,
        common: CommonAttentionMetadata,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> Sequence[Launch]:
        """Launches, not to be run, of every kernel that `forward` may need for some batch: a start compiles these while
        it is busy with other things. A backend of Triton kernels overrides it.

        builder: of this group. common: any batch. The tensors are on the meta device, laid out as they will be.
        """
        return ()


class AttentionBackend(ABC):
    """Facts about one backend. Never instantiated; registered by name in `attention.registry`."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, spec: Any, device: torch.device) -> str | None:
        """Why this backend cannot run `spec` on `device`; None when it can."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[MetadataBuilder[Any]]:
        """The builder's class."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[Any] | None:
        """The computation's class, made with the spec: its `forward` gets the operator's tensors, `metadata=` and
        `out`. None where the operator computes by itself, from tensors alone."""
