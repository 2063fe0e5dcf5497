"""Backend `compressed_attention`: the attention of `CompressedAttention`."""

from attention.backends.compressed_attention.backend import (
    CompressedAttentionBackend,
    CompressedAttentionImpl,
    CompressedAttentionMetadata,
    CompressedAttentionMetadataBuilder,
)

__all__ = [
    "CompressedAttentionBackend",
    "CompressedAttentionImpl",
    "CompressedAttentionMetadata",
    "CompressedAttentionMetadataBuilder",
]
