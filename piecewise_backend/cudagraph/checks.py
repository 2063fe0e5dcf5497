"""What a CUDA graph cannot record, decided operator by operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
# Tagged as having a dynamic shape, but only where an index is a mask.
_INDEXING = frozenset(
    {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}
)
_MASK_TYPES = (torch.bool, torch.uint8)


class CaptureRefused(RuntimeError):
    """An operator that no graph can record was met while recording; the message names it."""


def why_uncapturable(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a CUDA graph cannot record this call; None when it can."""
    if func in _INDEXING:
        masks = [i for i in tree_leaves(args[1]) if isinstance(i, torch.Tensor) and i.dtype in _MASK_TYPES]
        if not masks or _fills_by_mask(args):
            return None
        return "a boolean mask selects a data-dependent number of rows"
    if torch.Tag.dynamic_output_shape in func.tags:
        return "its output shape depends on data, which the host must wait for"
    if torch.Tag.data_dependent_output in func.tags:
        return "it reads a value on the host, which must wait for the device"
    if func is torch.ops.aten.lift_fresh.default and args[0].device.type not in ("cpu", "meta"):
        return "it makes a tensor of numbers on the host, and copies them through pageable memory; keep it in a buffer"
    return _host_copy(func, args, kwargs)


def _fills_by_mask(args: Sequence[Any]) -> bool:
    """`x[mask] = number` on a device: torch makes a `masked_fill` of it. (On the host a number cannot be told from a
    computed value, which would have to be read.)"""
    if len(args) < 3 or (len(args) > 3 and args[3]) or len(args[1]) != 1:
        return False
    value = args[2]
    return args[0].device.type != "cpu" and value.device.type == "cpu" and value.numel() == 1


def _host_copy(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """A copy between host and device is recordable from or to pinned memory only."""
    if func is torch.ops.aten._to_copy.default:
        source, target = args[0].device, torch.device(kwargs.get("device") or args[0].device)
        pinned = bool(kwargs.get("pin_memory")) or _is_pinned(args[0])
    elif func is torch.ops.aten.copy_.default:
        source, target = args[1].device, args[0].device
        pinned = _is_pinned(args[1]) or _is_pinned(args[0])
    else:
        return None
    if (source.type == "cpu") != (target.type == "cpu") and "meta" not in (source.type, target.type) and not pinned:
        return f"it copies from {source} to {target} through pageable host memory, which synchronises"
    return None


def _is_pinned(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return False
    return tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned()


def launches_work(func: torch._ops.OpOverload) -> bool:
    """Whether a call runs a kernel: views and bare allocations do not."""
    if func in _ALLOCATIONS:
        return False
    if func.is_view:
        # `to`, `reshape` and `contiguous` have the schema of a view but may copy. They are seen whole, instead of as
        # what they consist of, for tensors made in inference mode.
        return is_composite(func)
    returns = func._schema.returns
    if returns:  # sizes and strides are answered by the host
        return any("Tensor" in str(r.type) for r in returns)
    return any("Tensor" in str(a.type) for a in func._schema.arguments)


def is_composite(func: torch._ops.OpOverload) -> bool:
    """Whether an operator consists of others, so that its schema alone does not say what it does."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def written_arguments(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that a call writes to, by its schema."""
    written: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return written
