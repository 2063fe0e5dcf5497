"""Two values, one of them expected: how far apart, and whether that is more than rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Allowed error in units of the tensor's largest element, or of 1 where that is less; 1e-4 for float32."""
_TOLERANCE_FLOAT32, _TOLERANCE_FLOAT8 = 1e-4, 0.25


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a value is off."""

    max_abs: float
    max_rel: float
    allowed: float
    detail: str = ""


def distance(expected: Any, actual: Any, undefined: torch.Tensor | None = None) -> Distance | None:
    """How far `actual` is from `expected`; None where it is within rounding.

    `undefined`: a mask of elements that nothing wrote, which are left out. NaN equals NaN.
    """
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return None if expected == actual else Distance(math.inf, math.inf, 0.0, f"{actual!r} instead of {expected!r}")
    if expected.shape != actual.shape or expected.dtype is not actual.dtype:
        return Distance(math.inf, math.inf, 0.0, f"{_described(actual)} instead of {_described(expected)}")
    one, other = _wide(expected), _wide(actual)
    wrong = ~((one == other) | (one.isnan() & other.isnan()))
    if undefined is not None:
        wrong &= ~(undefined if undefined.ndim == wrong.ndim else undefined[..., None])  # a complex number is two
    if not bool(wrong.any()):
        return None
    finite = one[one.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    allowed = tolerance_of(expected.dtype) * scale
    one, other = one[wrong], other[wrong]
    off = (one - other).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    if float(off.max()) <= allowed:
        return None
    relative = (off / one.abs().clamp_min(1e-30)).nan_to_num(nan=math.inf, posinf=math.inf)
    return Distance(float(off.max()), float(relative.max()), allowed)


def tolerance_of(dtype: torch.dtype) -> float:
    """Allowed error of a value of `dtype`, relative to the largest element; 0 for integers and booleans."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return _TOLERANCE.get(dtype, _TOLERANCE_FLOAT8 if dtype.itemsize == 1 else _TOLERANCE_FLOAT32)


def differs(one: Any, other: Any) -> torch.Tensor | None:
    """Mask of the elements of two equally shaped tensors that are not equal to the bit; None where all are."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.shape != other.shape:
        return None
    mask = ~((one == other) | ((one != one) & (other != other)))
    return mask if bool(mask.any()) else None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    exact = tensor.dtype in (torch.float64, torch.int64, torch.int32, torch.uint32, torch.uint64)
    return tensor.to(torch.float64 if exact else torch.float32)


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
