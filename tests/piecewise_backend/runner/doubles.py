"""Backends that behave badly, or write down what they are asked: the torch backend's doubles, for windowed layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from attention.backends.pytorch import TorchAttentionImpl, TorchBackend, TorchMetadata, TorchMetadataBuilder
from attention.base import AttentionCGSupport, UncapturableMetadata
from attention.layers import Attention
from attention.metadata import CommonAttentionMetadata
from attention.registry import register_backend
from attention.specs import AttentionSpec
from tests.tiny import TinyDecoder

WINDOW = 64


class Build:
    """One call of a builder."""

    def __init__(self, backend: str, common: CommonAttentionMetadata, for_capture: bool) -> None:
        self.backend, self.common, self.for_capture = backend, common, for_capture

    def __repr__(self) -> str:
        return f"{self.backend} {self.common.num_tokens}{' for capture' if self.for_capture else ''}"


def windowed(builder_cls: type[TorchMetadataBuilder], name: str = "windowed") -> type[TorchBackend]:
    """A backend for layers with a sliding window, with this builder."""

    class Windowed(TorchBackend):
        @classmethod
        def unsupported_reason(cls, spec: AttentionSpec, device: torch.device) -> str | None:
            return None if spec.sliding_window else "it is for sliding windows"

        @staticmethod
        def get_builder_cls() -> type[TorchMetadataBuilder]:
            return builder_cls

        @staticmethod
        def get_impl_cls() -> type[TorchAttentionImpl]:
            return TorchAttentionImpl

    Windowed.name = name
    return Windowed


def install(
    monkeypatch: Any, builder_cls: type[TorchMetadataBuilder], name: str = "windowed", device: str = "cpu"
) -> None:
    """Have layers with a sliding window run on a backend with this builder, for the length of a test."""
    from attention import registry

    monkeypatch.setattr(registry, "_BACKENDS", {k: dict(v) for k, v in registry._BACKENDS.items()})
    monkeypatch.setattr(registry, "_PREFERENCE", {device: (name, "torch")})
    register_backend(name, windowed(builder_cls, name))


def supporting(level: AttentionCGSupport) -> type[TorchMetadataBuilder]:
    class Supporting(TorchMetadataBuilder):
        cudagraph_support = level

    return Supporting


class SingleTokenOnly(TorchMetadataBuilder):
    """Honest: refuses what it does not declare."""

    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> TorchMetadata:
        if for_capture and common.max_query_len > 1:
            raise UncapturableMetadata("it records one token a request")
        return super().build(common, for_capture=for_capture)


class ClaimsEverything(SingleTokenOnly):
    """Lies: declares ALWAYS, and refuses."""

    cudagraph_support = AttentionCGSupport.ALWAYS


class AllocatesAtRunTime(TorchMetadataBuilder):
    def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> TorchMetadata:
        built = super().build(common, for_capture=for_capture)
        return built if for_capture else dataclasses.replace(built, seq_lens=built.seq_lens.clone())


@dataclasses.dataclass(frozen=True)
class KernelMetadata(TorchMetadata):
    kernel: str = "decode"


class ChangesKernel(TorchMetadataBuilder):
    """Chooses by what is true of a batch, not by what is true of its padded sizes."""

    chosen: ClassVar[Callable[[CommonAttentionMetadata], str]] = lambda common: (
        "long" if int(common.seq_lens_cpu.max()) > 20 else "short"
    )

    def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> KernelMetadata:
        built = super().build(common, for_capture=for_capture)
        kernel = type(self).chosen(common)
        return KernelMetadata(built.query_start_loc, built.seq_lens, built.block_table, built.max_seq_len, kernel)


class InitialisesLazily(TorchMetadataBuilder):
    """Its very first metadata is good for that moment only: the buffers come with it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers: dict[int, torch.Tensor] = {}
        self._is_ready = False

    def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> TorchMetadata:
        built = super().build(common, for_capture=for_capture)
        if not self._is_ready:
            self._is_ready = True
            return dataclasses.replace(built, seq_lens=built.seq_lens.clone())
        mine = self._buffers.setdefault(common.num_reqs, torch.zeros_like(built.seq_lens))
        mine.copy_(built.seq_lens)
        return dataclasses.replace(built, seq_lens=mine)


def with_windows(model: TinyDecoder, *layers: int) -> TinyDecoder:
    """The model with sliding windows in some layers, too long to matter for short sequences."""
    for index in layers:
        old = model.layers[index].attention
        model.layers[index].attention = Attention(
            old.num_heads, old.head_size, num_kv_heads=old.num_kv_heads, sliding_window=WINDOW
        )
    return model


def recording(builds: list[Build], builder_cls: type[TorchMetadataBuilder], name: str) -> type[TorchMetadataBuilder]:
    """The same builder, writing down every call in `builds`."""

    class Recording(builder_cls):  # type: ignore[misc, valid-type]
        def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> Any:
            builds.append(Build(name, common, for_capture))
            return super().build(common, for_capture=for_capture)

    return Recording


def tiny(num_layers: int = 3, windows: tuple[int, ...] = (1,)) -> nn.Module:
    return with_windows(TinyDecoder(num_layers=num_layers), *windows)
