"""Backend `short_conv`: the causal depthwise convolution of `ShortConv`."""

from attention.backends.short_conv.backend import ShortConvBackend, ShortConvMetadata, ShortConvMetadataBuilder

__all__ = ["ShortConvBackend", "ShortConvMetadata", "ShortConvMetadataBuilder"]
