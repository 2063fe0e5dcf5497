"""What the short convolution's backend supports, and the facts of a batch that its operator reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.backends.devices import unsupported_device
from attention.base import AttentionBackend, AttentionCGSupport, MetadataBuilder
from attention.metadata import CommonAttentionMetadata
from attention.specs import ShortConvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvMetadata:
    """Views of the runner's buffers; see `CommonAttentionMetadata` for shapes."""

    token_request: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    state_slots: torch.Tensor


class ShortConvMetadataBuilder(MetadataBuilder[ShortConvMetadata]):
    """Hands the runner's buffers on."""

    # Each token finds its request on the device, whatever the mix.
    cudagraph_support = AttentionCGSupport.ALWAYS
    advances_on_device = True

    def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> ShortConvMetadata:
        """See `MetadataBuilder.build`."""
        return ShortConvMetadata(
            token_request=common.token_request,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            state_slots=common.state_slots,
        )


class ShortConvBackend(AttentionBackend):
    """A Triton kernel on CUDA devices, plain PyTorch on the CPU."""

    name = "short_conv"

    @classmethod
    def unsupported_reason(cls, spec: ShortConvSpec, device: torch.device) -> str | None:
        """See `AttentionBackend.unsupported_reason`."""
        return unsupported_device(device)

    @staticmethod
    def get_builder_cls() -> type[ShortConvMetadataBuilder]:
        """See `AttentionBackend.get_builder_cls`."""
        return ShortConvMetadataBuilder

    @staticmethod
    def get_impl_cls() -> None:
        """The operator takes tensors alone."""
        return None
