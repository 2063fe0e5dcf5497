"""Backend `linear_attention`: the gated delta rule over per-request states, recordable for uniform decode."""

from attention.backends.linear_attention.backend import (
    LinearAttentionBackend,
    LinearAttentionImpl,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)

__all__ = [
    "LinearAttentionBackend",
    "LinearAttentionImpl",
    "LinearAttentionMetadata",
    "LinearAttentionMetadataBuilder",
]
