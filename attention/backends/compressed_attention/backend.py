"""What the backend of compressed attention supports, the facts of a batch that it reads, and the computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.backends.compressed_attention import reference
from attention.backends.devices import unsupported_device
from attention.backends.views import ViewsBuilder
from attention.base import AttentionBackend
from attention.specs import CompressedAttentionSpec

_MAX_HEAD_SIZE = 512
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionMetadata:
    """Views of the runner's buffers; see `CommonAttentionMetadata` for shapes."""

    token_request: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class CompressedAttentionMetadataBuilder(ViewsBuilder[CompressedAttentionMetadata]):
    """Each token finds its request and the keys it sees on the device."""

    metadata_cls = CompressedAttentionMetadata


class CompressedAttentionImpl:
    """The computation of one group of layers: a Triton kernel for CUDA tensors, plain PyTorch for CPU tensors."""

    def __init__(self, spec: CompressedAttentionSpec) -> None:
        self.spec = spec

    def forward(
        self,
        query: torch.Tensor,
        local_cache: torch.Tensor,
        compressed_cache: torch.Tensor,
        metadata: CompressedAttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """See `attention.layers.CompressedAttention`; the result goes to `out`.

        query, out: [T, num_heads, head_size] in the layer's dtype; rows of padded tokens are left as they are.
        local_cache: [num_blocks, block_size, head_size]. compressed_cache: [num_blocks, block_size // ratio,
        head_size]. This step's latents and entries are already in them.
        """
        if query.is_cuda:
            from attention.backends.compressed_attention.kernels import compressed_attention
        else:
            compressed_attention = reference.compressed_attention
        compressed_attention(query, local_cache, compressed_cache, metadata, out, self.spec)


class CompressedAttentionBackend(AttentionBackend):
    """A Triton kernel on CUDA devices, plain PyTorch on the CPU."""

    name = "compressed_attention"

    @classmethod
    def unsupported_reason(cls, spec: CompressedAttentionSpec, device: torch.device) -> str | None:
        """See `AttentionBackend.unsupported_reason`."""
        reason = unsupported_device(device)
        if reason is None and device.type == "cuda":
            if spec.dtype not in _DTYPES:
                return f"dtype {spec.dtype} is not one of {[str(dtype) for dtype in _DTYPES]}"
            if spec.head_size > _MAX_HEAD_SIZE:
                return f"head_size must be at most {_MAX_HEAD_SIZE}, got {spec.head_size}"
        return reason

    @staticmethod
    def get_builder_cls() -> type[CompressedAttentionMetadataBuilder]:
        """See `AttentionBackend.get_builder_cls`."""
        return CompressedAttentionMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[CompressedAttentionImpl]:
        """See `AttentionBackend.get_impl_cls`."""
        return CompressedAttentionImpl
