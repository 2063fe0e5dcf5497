"""What recorded operators read of their metadata: kept at capture, compared before every replay.

A graph reads addresses. Metadata that has moved, or that was made for another kernel than the one recorded, would be
read wrongly and silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


class StaleMetadata(RuntimeError):
    """Metadata of this step does not lie where, or is not what, the recorded graph reads."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One group's metadata as it was recorded."""

    layer: str
    """The first layer of the group."""
    backend: str
    kept: Any
    """The metadata object itself: keeps its tensors alive."""
    tensors: tuple[tuple[str, torch.Tensor, int], ...]
    """(field, tensor, address)."""
    values: tuple[tuple[str, Any], ...]
    """(field, value) of what is no tensor."""

    @classmethod
    def take(cls, metadata: Any, *, layer: str, backend: str, unrecorded: frozenset[str]) -> Fingerprint:
        """Of `metadata`, less the fields in `unrecorded`, which no recorded kernel reads."""
        tensors, values = [], []
        for name, value in fields_of(metadata):
            if name in unrecorded:
                continue
            if isinstance(value, torch.Tensor):
                tensors.append((name, value, value.data_ptr()))
            else:
                values.append((name, value))
        return cls(layer, backend, metadata, tuple(tensors), tuple(values))

    def check(self, metadata: Any) -> None:
        """StaleMetadata, naming layer and field, where `metadata` differs from what was recorded."""
        for name, recorded, address in self.tensors:
            now = getattr(metadata, name, None)
            if not _is_same(now, recorded, address):
                raise StaleMetadata(self._tensor_message(name, recorded, address, now))
        for name, value in self.values:
            now = getattr(metadata, name, None)
            if now is not value and now != value:
                raise StaleMetadata(self._value_message(name, value, now))

    def _tensor_message(self, name: str, recorded: torch.Tensor, address: int, now: Any) -> str:
        described = _describe(now, now.data_ptr()) if isinstance(now, torch.Tensor) else repr(now)
        return (
            f"{self._subject(name)}: the graph reads {_describe(recorded, address)}, this step's is {described}. The "
            "builder must write into persistent buffers whose views depend on padded sizes alone"
        )

    def _value_message(self, name: str, recorded: Any, now: Any) -> str:
        return (
            f"{self._subject(name)}: {recorded!r} was recorded and cannot change, this step's is {now!r}. If recorded "
            "kernels depend on it, the builder must derive it from padded sizes and maxima alone, or declare less "
            "cudagraph_support; if they do not, name it in the builder's unrecorded_fields"
        )

    def _subject(self, name: str) -> str:
        return f"metadata field {name!r} of layer {self.layer!r} (attention backend {self.backend!r})"


def fields_of(metadata: Any) -> Iterable[tuple[str, Any]]:
    """(name, value) of a metadata object's fields: of a dataclass, a mapping's items, or plain attributes."""
    if dataclasses.is_dataclass(metadata):
        return [(f.name, getattr(metadata, f.name)) for f in dataclasses.fields(metadata)]
    return list(vars(metadata).items()) if hasattr(metadata, "__dict__") else []


def check_all(fingerprints: Iterable[Fingerprint], metadata: Mapping[str, Any]) -> None:
    """Compare each fingerprint with this step's metadata of its layer."""
    for fingerprint in fingerprints:
        fingerprint.check(metadata[fingerprint.layer])


def _is_same(now: Any, recorded: torch.Tensor, address: int) -> bool:
    """Same memory, shape, strides and dtype; the quick ways first."""
    if now is recorded:
        return recorded.data_ptr() == address
    if not isinstance(now, torch.Tensor) or now.dtype is not recorded.dtype or now.data_ptr() != address:
        return False
    return now.is_set_to(recorded) or (now.shape == recorded.shape and now.stride() == recorded.stride())


def _describe(tensor: torch.Tensor, address: int) -> str:
    return (
        f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}, strides {tensor.stride()}, at {address:#x}"
    )
