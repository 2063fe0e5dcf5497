"""Backend `flashinfer`: FlashInfer's paged decode and prefill kernels, planned on the host once a step."""

from attention.backends.flashinfer.backend import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadata,
    FlashInferMetadataBuilder,
)

__all__ = ["FlashInferBackend", "FlashInferImpl", "FlashInferMetadata", "FlashInferMetadataBuilder"]
