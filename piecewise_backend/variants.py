"""What plain callers capture, and at which addresses: targets, captured variants, and checks on a call's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecewise_backend.cudagraph.capture import CapturedProgram
from piecewise_backend.cudagraph.rows import RealRows
from piecewise_backend.outputs import HandOut
from piecewise_backend.program import Program
from piecewise_backend.reporting.records import SizeReport
from piecewise_backend.static_inputs import CopyIn, StaticInputs


@dataclass(frozen=True, slots=True)
class Target:
    """What one capture would serve."""

    size: int
    exact: bool
    """Only calls of exactly this size: nothing is padded."""
    sizes: tuple[int, ...]
    """All symbolic sizes, where exact."""
    addresses: tuple[int, ...]
    """Of the inputs that keep their own addresses."""


@dataclass(slots=True, eq=False)
class Variant:
    """One captured size at one set of addresses."""

    captured: CapturedProgram
    static: StaticInputs
    rows: RealRows
    target: Target
    report: SizeReport
    addresses: list[int]


@dataclass(slots=True, eq=False)
class Bound:
    """A variant as it serves calls of one size: nothing is worked out again from call to call."""

    variant: Variant
    count: int
    copy_in: CopyIn
    hand_out: HandOut
    written: frozenset[int]
    """Storages that the graphs write to where they lie; none of the copied inputs may share them."""


def written_storages(program: Program) -> frozenset[int]:
    """Numbers of the inputs' storages that the program writes to."""
    return frozenset(i.storage for i in program.inputs if i.is_written)


def own_address_inputs(program: Program) -> list[int]:
    """Inputs recorded where they are: parameters, and whatever shares memory with something the program writes."""
    written = written_storages(program)
    return [
        n
        for n, i in enumerate(program.inputs)
        if isinstance(i.fake, torch.Tensor) and (i.is_static or i.storage in written)
    ]


def aliases_as_traced(program: Program, args: Sequence[Any]) -> bool:
    """Whether written memory is shared by the same inputs, at the same distances, as in the trace."""
    written_in_trace = written_storages(program)
    if not written_in_trace:
        return True
    inputs = program.inputs
    tensors = [i for i, given in enumerate(inputs) if isinstance(given.fake, torch.Tensor)]
    storages = [args[i].untyped_storage().data_ptr() if args[i].numel() else -1 - i for i in tensors]
    written = {s for i, s in zip(tensors, storages, strict=True) if inputs[i].storage in written_in_trace}
    first: dict[int, int] = {}
    traced: dict[int, int] = {}
    for i, storage in zip(tensors, storages, strict=True):
        fake = inputs[i].fake
        expected = traced.setdefault(inputs[i].storage, i) if inputs[i].storage in written_in_trace else i
        if (first.setdefault(storage, i) if storage in written else i) != expected and args[i].numel():
            return False
        distance = fake.storage_offset() - inputs[expected].fake.storage_offset()
        if isinstance(distance, int) and args[i].storage_offset() - args[expected].storage_offset() != distance:
            return False
    return True


def same_addresses(args: Sequence[Any], addresses: list[int], indices: list[int]) -> bool:
    """Whether the tensors at `indices` still lie at `addresses` (one per argument)."""
    if _same_addresses_native is not None:
        return _same_addresses_native(list(args), addresses, indices)
    return all(args[i].data_ptr() == addresses[i] for i in indices)


# Present in CUDA builds only.
_same_addresses_native = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def addresses_of(args: Sequence[Any]) -> list[int]:
    """`address_of` each argument."""
    return [address_of(a) for a in args]


def address_of(value: Any) -> int:
    """Where a tensor lies; 0 for anything else."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else 0


def differs_in_addresses_only(one: Target, other: Target) -> bool:
    """Whether two targets are the same sizes, recorded elsewhere."""
    return (one.size, one.exact, one.sizes) == (other.size, other.exact, other.sizes) and one != other


def sizes_text(target: Target) -> str:
    """The target in a report's words."""
    return f"{target.size} rows" if target.size else "fixed sizes"
