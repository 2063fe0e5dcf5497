"""Backend `triton`: paged attention for any mix of prefill and decode, recordable for every batch."""

from attention.backends.triton.backend import TritonAttentionImpl, TritonBackend
from attention.backends.triton.plan import TritonMetadata, TritonMetadataBuilder
from attention.backends.triton.write import write_kv_cache

__all__ = [
    "TritonAttentionImpl",
    "TritonBackend",
    "TritonMetadata",
    "TritonMetadataBuilder",
    "write_kv_cache",
]
