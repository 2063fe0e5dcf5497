"""What the backend of KV compressors supports, and the facts of a batch that its operator reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.backends.in_piece import InPieceBackend
from attention.backends.views import ViewsBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCompressorMetadata:
    """Views of the runner's buffers; see `CommonAttentionMetadata` for shapes."""

    token_request: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    state_slots: torch.Tensor
    block_table: torch.Tensor


class KVCompressorMetadataBuilder(ViewsBuilder[KVCompressorMetadata]):
    """Each token finds its request on the device."""

    metadata_cls = KVCompressorMetadata


class KVCompressorBackend(InPieceBackend):
    """Windows of tokens, compressed."""

    name = "kv_compressor"

    @staticmethod
    def get_builder_cls() -> type[KVCompressorMetadataBuilder]:
        """See `AttentionBackend.get_builder_cls`."""
        return KVCompressorMetadataBuilder
