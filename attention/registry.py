"""Backend names to backends, imported when first asked for; and the automatic choice, with its reasons."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass

import torch

from attention.base import AttentionBackend, AttentionSpec

_BACKENDS: dict[str, str | type[AttentionBackend]] = {
    "torch": "attention.backends.pytorch:TorchBackend",
    "triton": "attention.backends.triton:TritonBackend",
}
_PREFERENCE = {"cuda": ("triton", "torch"), "cpu": ("torch",)}


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend, and what was passed over on the way to it: (name, why) pairs."""

    backend: type[AttentionBackend]
    passed_over: tuple[tuple[str, str], ...] = ()


def register_backend(name: str, backend: str | type[AttentionBackend]) -> None:
    """Add a backend: its class, or "module:Class" to be imported on first use. A known name is replaced."""
    _BACKENDS[name] = backend


def available_backends() -> tuple[str, ...]:
    """Every registered name, importable here or not."""
    return tuple(_BACKENDS)


def get_backend(name: str) -> type[AttentionBackend]:
    """The backend called `name`. ValueError for an unknown name, ImportError where its library is missing."""
    if name not in _BACKENDS:
        near = difflib.get_close_matches(name, _BACKENDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown attention backend {name!r}, registered are {sorted(_BACKENDS)}{hint}")
    entry = _BACKENDS[name]
    if isinstance(entry, str):
        module, _, attribute = entry.partition(":")
        entry = getattr(importlib.import_module(module), attribute)
        _BACKENDS[name] = entry
    return entry


def choose_backend(spec: AttentionSpec, device: torch.device, forced: str | None = None) -> BackendChoice:
    """The first backend in the device's order of preference that runs `spec`; with `forced`, that one or an error."""
    if forced is not None:
        backend = get_backend(forced)
        if (reason := backend.unsupported_reason(spec, device)) is not None:
            raise ValueError(
                f"attention backend {forced!r} cannot run this model: {reason}. Leave the backend unset to have one "
                f"chosen, or use one of {sorted(set(_BACKENDS) - {forced})}"
            )
        return BackendChoice(backend)
    passed_over: list[tuple[str, str]] = []
    for name in _PREFERENCE.get(device.type, ("torch",)):
        try:
            backend = get_backend(name)
        except ImportError as error:
            passed_over.append((name, f"not importable here: {error}"))
            continue
        if (reason := backend.unsupported_reason(spec, device)) is None:
            return BackendChoice(backend, tuple(passed_over))
        passed_over.append((name, reason))
    raise ValueError(f"no attention backend runs {spec} on {device}: {passed_over}")
