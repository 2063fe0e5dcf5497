"""Attention over paged caches: backends, their metadata, the operators a compiled graph is split at."""

from attention.base import AttentionBackend, AttentionCGSupport, AttentionImpl, MetadataBuilder, UncapturableMetadata
from attention.metadata import CommonAttentionMetadata
from attention.specs import AttentionSpec

__all__ = [
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionSpec",
    "CommonAttentionMetadata",
    "MetadataBuilder",
    "UncapturableMetadata",
]
