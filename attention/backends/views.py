"""Metadata that is the runner's own buffers: all that a kernel needs whose tokens find their requests on the device."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

from attention.base import AttentionCGSupport, MetadataBuilder
from attention.metadata import CommonAttentionMetadata

MetadataT = TypeVar("MetadataT")


class ViewsBuilder(MetadataBuilder[MetadataT]):
    """Hands the runner's buffers on: each field of `metadata_cls` is the one of that name in the batch's facts."""

    # Nothing of a launch depends on the batch, whatever the mix.
    cudagraph_support = AttentionCGSupport.ALWAYS
    advances_on_device = True
    metadata_cls: ClassVar[type[Any]]
    _names: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._names = tuple(field.name for field in dataclasses.fields(cls.metadata_cls))

    def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> MetadataT:
        """See `MetadataBuilder.build`."""
        return self.metadata_cls(**{name: getattr(common, name) for name in self._names})
