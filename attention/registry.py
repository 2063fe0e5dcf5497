"""Backend names to backends, imported when first asked for; and the automatic choice, with its reasons."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass

import torch

from attention.base import AttentionBackend
from attention.specs import AttentionSpec, LayerSpec

_BACKENDS: dict[str, dict[str, str | type[AttentionBackend]]] = {
    "attention": {
        "torch": "attention.backends.pytorch:TorchBackend",
        "triton": "attention.backends.triton:TritonBackend",
        "flashinfer": "attention.backends.flashinfer:FlashInferBackend",
    },
    "short_conv": {"short_conv": "attention.backends.short_conv:ShortConvBackend"},
    "kv_compressor": {"kv_compressor": "attention.backends.kv_compressor:KVCompressorBackend"},
    "compressed_attention": {
        "compressed_attention": "attention.backends.compressed_attention:CompressedAttentionBackend"
    },
    "linear_attention": {"linear_attention": "attention.backends.linear_attention:LinearAttentionBackend"},
}
"""Kind of layer (`LayerSpec.kind`) to name to backend."""
_PREFERENCE = {"cuda": ("triton", "torch"), "cpu": ("torch",)}
"""For attention. Backends of other kinds are tried in the order in which they were registered."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, and what was passed over on the way to it: (name, why) pairs."""

    backend: type[AttentionBackend]
    passed_over: tuple[tuple[str, str], ...] = ()


def register_backend(name: str, backend: str | type[AttentionBackend], *, kind: str = AttentionSpec.kind) -> None:
    """Add a backend for layers of `kind`: its class, or "module:Class" to be imported on first use. A known name is
    replaced."""
    _BACKENDS.setdefault(kind, {})[name] = backend


def available_backends(kind: str = AttentionSpec.kind) -> tuple[str, ...]:
    """Every registered name, importable here or not."""
    return tuple(_BACKENDS.get(kind, ()))


def get_backend(name: str, kind: str = AttentionSpec.kind) -> type[AttentionBackend]:
    """The backend called `name`. ValueError for an unknown name, ImportError where its library is missing."""
    known = _BACKENDS.get(kind, {})
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {kind} backend {name!r}, registered are {sorted(known)}{hint}")
    entry = known[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(importlib.import_module(module), attribute)
        known[name] = entry
    return entry


def choose_backend(spec: LayerSpec, device: torch.device, forced: str | None = None) -> BackendChoice:
    """The first backend in the order of preference that runs `spec` on `device`; with `forced`, that one or an error.

    `forced` names a backend for attention; layers of other kinds take no notice of it.
    """
    kind = spec.kind
    if forced is not None and kind == AttentionSpec.kind:
        return BackendChoice(_forced_backend(forced, spec, device))
    names = available_backends(kind)
    if kind == AttentionSpec.kind:
        names = _PREFERENCE.get(device.type, ("torch",))
    passed_over: list[tuple[str, str]] = []
    for name in names:
        try:
            backend = get_backend(name, kind)
        except ImportError as error:
            passed_over.append((name, f"not importable here: {error}"))
            continue
        if (reason := backend.unsupported_reason(spec, device)) is None:
            return BackendChoice(backend, tuple(passed_over))
        passed_over.append((name, reason))
    raise ValueError(
        f"no {kind} backend runs {spec} on {device}: {passed_over or 'none is registered'}; add one with "
        f"attention.registry.register_backend(..., kind={kind!r})"
    )


def _forced_backend(name: str, spec: LayerSpec, device: torch.device) -> type[AttentionBackend]:
    backend = get_backend(name)
    if (reason := backend.unsupported_reason(spec, device)) is not None:
        raise ValueError(
            f"attention backend {name!r} cannot run this model: {reason}. Leave the backend unset to have one "
            f"chosen, or use one of {sorted(set(available_backends()) - {name})}"
        )
    return backend
