"""Backend `kv_compressor`: windows of tokens become entries of a compressed cache, as in `KVCompressor`."""

from attention.backends.kv_compressor.backend import (
    KVCompressorBackend,
    KVCompressorMetadata,
    KVCompressorMetadataBuilder,
)

__all__ = ["KVCompressorBackend", "KVCompressorMetadata", "KVCompressorMetadataBuilder"]
