"""Groups: layers that share a backend and a spec share one builder and one set of metadata."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attention.base import AttentionBackend, AttentionCGSupport, MetadataBuilder
from attention.registry import choose_backend
from attention.specs import LayerSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Layers that run the same kernel on the same kind of cache."""

    backend: type[AttentionBackend]
    spec: LayerSpec
    layer_names: tuple[str, ...]
    builder: MetadataBuilder[Any]
    impl: Any
    """See `AttentionBackend.get_impl_cls`; None where the operator needs none."""
    support: AttentionCGSupport

    @property
    def in_piece(self) -> bool:
        """Whether the layers' operator belongs into the pieces."""
        return self.spec.in_piece

    def __str__(self) -> str:
        count = len(self.layer_names)
        return f"{self.backend.name} ({count} layer{'s' if count > 1 else ''})"


@dataclass(frozen=True, slots=True)
class AttentionCGSupportInfo:
    """The least support level of a model's groups, and the backend that sets it."""

    min_support: AttentionCGSupport
    set_by: str


def init_attn_backend(
    specs: Mapping[str, LayerSpec],
    *,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    device: torch.device,
    forced: str | None = None,
) -> tuple[list[AttentionGroup], AttentionCGSupportInfo, list[tuple[str, str]]]:
    """Choose a backend for every layer and group the layers.

    Returns the groups, their least support, and what was passed over: (backend name, why). ValueError when a forced
    backend cannot run a layer, or none can.
    """
    layers_of: dict[tuple[type[AttentionBackend], LayerSpec], list[str]] = {}
    passed_over: dict[tuple[str, str], None] = {}
    for name, spec in specs.items():
        choice = choose_backend(spec, device, forced)
        passed_over.update(dict.fromkeys(choice.passed_over))
        layers_of.setdefault((choice.backend, spec), []).append(name)
    groups = []
    for (backend, spec), names in layers_of.items():
        builder = backend.get_builder_cls()(
            spec, max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens, max_model_len=max_model_len, device=device
        )
        impl_cls = backend.get_impl_cls()
        groups.append(
            AttentionGroup(
                backend=backend,
                spec=spec,
                layer_names=tuple(names),
                builder=builder,
                impl=None if impl_cls is None else impl_cls(spec),
                support=_declared_support(backend, builder),
            )
        )
    return groups, least_support(groups), list(passed_over)


def least_support(groups: list[AttentionGroup]) -> AttentionCGSupportInfo:
    """The least support of `groups`."""
    if not groups:
        return AttentionCGSupportInfo(AttentionCGSupport.ALWAYS, "no attention layers")
    least = min(groups, key=lambda g: g.support)
    return AttentionCGSupportInfo(least.support, least.backend.name)


def _declared_support(backend: type[AttentionBackend], builder: MetadataBuilder[Any]) -> AttentionCGSupport:
    """What the builder says; NEVER, with a warning, for one that says nothing."""
    try:
        return AttentionCGSupport(builder.get_cudagraph_support())
    except (AttributeError, ValueError):
        logger.warning(
            "attention backend %r does not declare cudagraph_support: taken as NEVER, so it runs between graphs. "
            "Set cudagraph_support on %s",
            backend.name,
            type(builder).__name__,
        )
        return AttentionCGSupport.NEVER
