"""What the short convolution's backend supports, and the facts of a batch that its operator reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.backends.in_piece import InPieceBackend
from attention.backends.views import ViewsBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvMetadata:
    """Views of the runner's buffers; see `CommonAttentionMetadata` for shapes."""

    token_request: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    state_slots: torch.Tensor


class ShortConvMetadataBuilder(ViewsBuilder[ShortConvMetadata]):
    """Each token finds its request on the device."""

    metadata_cls = ShortConvMetadata


class ShortConvBackend(InPieceBackend):
    """The causal depthwise convolution."""

    name = "short_conv"

    @staticmethod
    def get_builder_cls() -> type[ShortConvMetadataBuilder]:
        """See `AttentionBackend.get_builder_cls`."""
        return ShortConvMetadataBuilder
