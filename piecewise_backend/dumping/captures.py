"""What a capture read: inputs and metadata with shapes, dtypes and addresses, as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attention.forward_context import current_forward_context
from piecewise_backend.cudagraph.capture import CapturedProgram
from piecewise_backend.cudagraph.fingerprint import fields_of
from piecewise_backend.program import Program


def describe_capture(program: Program, args: Sequence[Any], captured: CapturedProgram) -> dict[str, Any]:
    """One capture, during the forward context that it was made in. "fingerprint" is equal for equal addresses,
    shapes and dtypes."""
    context = current_forward_context()
    inputs = [
        {"name": i.name, "is_static": i.is_static, "is_written": i.is_written, **_value(a)}
        for i, a in zip(program.inputs, args, strict=True)
    ]
    metadata = _metadata({} if context is None else context.metadata)
    facts = json.dumps([inputs, metadata], sort_keys=True)
    return {
        "variant": "",
        "fingerprint": hashlib.sha256(facts.encode()).hexdigest()[:16],
        "num_graphs": captured.num_graphs,
        "seconds": captured.seconds,
        "memory_bytes": captured.memory_bytes,
        "recorded_breakpoints": list(captured.recorded),
        "eager_steps": list(captured.eager),
        "inputs": inputs,
        "metadata": metadata,
    }


def _metadata(by_layer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each metadata object once, with the layers that share it."""
    found: dict[int, dict[str, Any]] = {}
    for layer, metadata in by_layer.items():
        if id(metadata) not in found:
            fields = {name: _value(value) for name, value in fields_of(metadata)}
            found[id(metadata)] = {"type": type(metadata).__name__, "layers": [], "fields": fields}
        found[id(metadata)]["layers"].append(layer)
    return list(found.values())


def _value(value: Any) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        return {"value": value if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"}
    if value.layout is not torch.strided:
        return {"dtype": str(value.dtype), "shape": list(value.shape), "layout": str(value.layout)}
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "strides": list(value.stride()),
        "device": str(value.device),
        "address": hex(value.data_ptr()),
    }
