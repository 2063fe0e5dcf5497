"""Which operators break a graph: the registry, and how a graph node's target is matched against it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from piecewise_backend.names import unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakpoint:
    """One operator at which graphs are split."""

    name: str
    """"namespace::operator", or "module.function" for a Python function that Dynamo leaves in the graph."""
    capturable: bool = False
    """Whether its kernels may be recorded at all. An operator nobody vouched for always breaks."""
    owns_metadata: bool = False
    """Whether it knows the true number of rows itself (from metadata); else it is given the real rows only."""
    compiled: bool = False
    """Whether it is a kernel only once Inductor has compiled it; run as traced it would be right but slow."""


_DEFAULTS = (
    Breakpoint(name="mrv2::attention", capturable=True, owns_metadata=True),
    Breakpoint(name="mrv2::compressed_attention", capturable=True, owns_metadata=True),
    Breakpoint(name="mrv2::linear_attention", capturable=True, owns_metadata=True),
    Breakpoint(name="aten::scaled_dot_product_attention", capturable=True),
    Breakpoint(name="higher_order::flex_attention", capturable=True, compiled=True),
)
_FLASH_ATTENTION = ("_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_kvcache_forward")

_registered: dict[str, Breakpoint] = {b.name: b for b in _DEFAULTS}

_BUILTIN_TYPES = (types.BuiltinFunctionType, types.MethodDescriptorType)


@functools.cache
def _aten_names() -> frozenset[str]:
    return frozenset(n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))


def target_names(target: Any) -> tuple[str, ...]:
    """Every name a node's target answers to, the most specific first.

    Dynamo calls a custom operator through its overload packet, other tools through the overload: both match.
    """
    if isinstance(target, torch._ops.OpOverload):
        base = target._schema.name
        return (f"{base}.{target._schema.overload_name or 'default'}", base)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return (target._qualified_op_name,)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return (f"higher_order::{target.name()}",)
    if isinstance(target, torch._library.custom_ops.CustomOpDef):
        return (target._qualname,)
    if isinstance(target, str):  # a method call in the graph: tensor.add_(...)
        return (f"aten::{target}",)
    if callable(target):
        module = getattr(target, "__module__", None) or ""
        name = str(getattr(target, "__qualname__", None) or getattr(target, "__name__", type(target).__name__))
        plain = name.rpartition(".")[2]
        if isinstance(target, _BUILTIN_TYPES) and f"aten::{plain}" in _aten_names():
            return (f"aten::{plain}",)  # torch.mm, torch.nn.functional.linear, ...: an operator under a Python name
        return (f"{module}.{name}",)
    return ()


def register_breakpoint(op: Any, *, capturable: bool = False, owns_metadata: bool = False) -> Any:
    """Split graphs at `op` from now on; returns `op`, so it also decorates.

    `op`: an operator (`torch.ops.my.op`, the result of `torch.library.custom_op`), a Python function that Dynamo keeps
    whole (`torch.compiler.allow_in_graph`), or a name. ValueError if it is none of these.

        @register_breakpoint
        @torch.library.custom_op("my::attention", mutates_args=("out",))
        def attention(q: Tensor, out: Tensor) -> None: ...
    """
    name = _resolve_name(op)
    _registered[name] = Breakpoint(name=name, capturable=capturable, owns_metadata=owns_metadata)
    return op


def unregister_breakpoint(op: Any) -> None:
    """Take `op` out of the registry again."""
    _registered.pop(_resolve_name(op), None)


def find_breakpoints(splitting_ops: Iterable[Any] = ()) -> dict[str, Breakpoint]:
    """The registry, flash-attn's operators when installed, and `splitting_ops`, by name.

    ValueError for a name that matches no operator that exists, with near misses.
    """
    found = dict(_registered)
    if importlib.util.find_spec("flash_attn") is not None:
        found |= {f"flash_attn::{n}": Breakpoint(name=f"flash_attn::{n}", capturable=True) for n in _FLASH_ATTENTION}
    for op in splitting_ops:
        name = _resolve_name(op)
        found.setdefault(name, Breakpoint(name=name))
    return found


def match(target: Any, breakpoints: dict[str, Breakpoint]) -> Breakpoint | None:
    """The breakpoint that a node's target is, if it is one."""
    for name in target_names(target):
        if name in breakpoints:
            return breakpoints[name]
    return None


def _resolve_name(op: Any) -> str:
    if not isinstance(op, str):
        names = target_names(op)
        if not names:
            raise ValueError(
                f"a breakpoint must be an operator, a function or a name, got {op!r}; wrap your function with "
                "torch.library.custom_op first"
            )
        return names[-1] if "::" in names[-1] else names[0]
    name = op.replace("torch.ops.", "", 1).replace(".", "::", 1) if op.startswith("torch.ops.") else op
    if name in _registered:
        return name
    if "::" not in name and (function := _find_function(name)) is not None:
        return target_names(function)[0]
    known = set(torch._C._dispatch_get_all_op_names())
    known |= {n.rpartition(".")[0] for n in known if "." in n.partition("::")[2]} | set(_registered)
    if name.removesuffix(".default") not in known and name not in known:
        raise unknown_name("splitting op", op, known)
    return name.removesuffix(".default")


def _find_function(dotted: str) -> Callable[..., Any] | None:
    module, _, attribute = dotted.rpartition(".")
    if not module or not attribute:
        return None
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None
    return found if callable(found) else None
