"""Is padding harmless? Tried, not assumed: the program runs with different rubbish in the padded rows.

Real rows must come out bitwise equal whatever the padded rows hold, and close to a run without padding (a program
may use its size as a number). Memory that the program writes is compared too, and put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piecewise_backend.cudagraph.capture import Padded
from piecewise_backend.cudagraph.rows import RealRows, TokenDim
from piecewise_backend.program import Program
from piecewise_backend.static_inputs import StaticInputs

NUM_RUBBISH = 3
_LARGE = 1.0e4


def why_padding_matters(
    program: Program, args: Sequence[Any], static: StaticInputs, count: int, size: int
) -> str | None:
    """Why a real row depends on padding when `count` rows are padded to `size`; None when none does."""
    dim = program.token_dim
    saved = SavedState(program, args)
    counts = [count] + ([size // 2] if 2 <= size // 2 < count else [])
    try:
        for real in counts:
            why = _try_count(program, _cut(program, dim, args, real), static, real, size, saved)
            if why is not None:
                return why
    finally:
        saved.restore()
    return None


class SavedState:
    """Copies of the inputs that a program writes to."""

    def __init__(self, program: Program, args: Sequence[Any]) -> None:
        self.tensors = [a for i, a in zip(program.inputs, args, strict=True) if i.is_written]
        self.copies = [t.clone() for t in self.tensors]

    def restore(self) -> None:
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            tensor.copy_(copy)


def _cut(program: Program, dim: TokenDim, args: Sequence[Any], count: int) -> list[Any]:
    """The first `count` rows of each input, laid out as a caller's own tensor would be."""
    result = []
    for given, value in zip(program.inputs, args, strict=True):
        cut = dim.narrow(value, given.fake, count)
        if isinstance(cut, torch.Tensor) and cut.shape != value.shape and not given.is_written:
            fresh = dim.empty(given.fake, count)
            fresh.copy_(cut)
            cut = fresh
        result.append(cut)
    return result


def _try_count(
    program: Program, args: list[Any], static: StaticInputs, count: int, size: int, saved: SavedState
) -> str | None:
    dim = program.token_dim
    padded = Padded(dim, size, RealRows(count))
    exact = _results(program, program.run(args), saved, dim, count, count)
    first = None
    for kind in range(NUM_RUBBISH):
        saved.restore()
        _fill(static, args, count, kind)
        results = _results(program, program.run(static.args, padded=padded), saved, dim, count, size)
        if first is None:
            first = results
            if (name := _first_difference(exact, results, close)) is not None:
                return f"{name} at {count} rows differs from {count} rows padded to {size}"
        elif (name := _first_difference(first, results, same)) is not None:
            piece = _blame(program, static, args, padded, kind, saved)
            return f"{name} changes with the content of padded rows; the first to differ is {piece}"
    saved.restore()
    return None


def _fill(static: StaticInputs, args: Sequence[Any], count: int, kind: int) -> None:
    static.copy_in(args, count)
    for index, dim, rows in static.padded_rows(count):
        if rows.dtype.is_floating_point or rows.dtype.is_complex:
            rows.fill_((float("nan"), _LARGE, -_LARGE)[kind])
        elif kind == 0 or args[index].shape[dim] == 0:
            rows.fill_(0)
        else:  # an index must stay valid, so only values that occur are used
            rows.fill_(args[index].select(dim, 0 if kind == 1 else -1).reshape(-1)[0])


def _results(
    program: Program, outputs: Sequence[Any], saved: SavedState, dim: TokenDim, count: int, size: int
) -> list[tuple[str, Any]]:
    """Outputs cut to real rows, and written memory: (what, copy)."""
    found = []
    for index, (value, fake) in enumerate(zip(outputs, program.output_fakes, strict=True)):
        if isinstance(value, torch.Tensor):
            found.append((f"output {index}", dim.narrow(value, fake, count).clone()))
    names = [i.name for i in program.inputs if i.is_written]
    found += [(f"written input {n}", t.clone()) for n, t in zip(names, saved.tensors, strict=True)]
    return found


def _first_difference(one: list[tuple[str, Any]], other: list[tuple[str, Any]], equal: Any) -> str | None:
    for (name, a), (_, b) in zip(one, other, strict=True):
        if not equal(a, b):
            return name
    return None


def _blame(
    program: Program, static: StaticInputs, args: Sequence[Any], padded: Padded, kind: int, saved: SavedState
) -> str:
    """The first step whose real rows differ between rubbish 0 and rubbish `kind`."""
    seen: list[list[torch.Tensor]] = []
    dim, count = padded.dim, padded.rows.count

    def real_rows(step: Any, results: Sequence[Any]) -> list[torch.Tensor]:
        pairs = zip(results, step.output_fakes, strict=True)
        return [dim.narrow(v, f, count).clone() for v, f in pairs if isinstance(v, torch.Tensor)]

    saved.restore()
    _fill(static, args, count, 0)
    program.run(static.args, padded=padded, watch=lambda step, results: seen.append(real_rows(step, results)))
    names: list[str] = []
    others = iter(seen)

    def compare(step: Any, results: Sequence[Any]) -> None:
        pairs = zip(next(others), real_rows(step, results), strict=True)
        if not all(same(a, b) for a, b in pairs):
            names.append(step.name)

    saved.restore()
    _fill(static, args, count, kind)
    program.run(static.args, padded=padded, watch=compare)
    saved.restore()
    return names[0] if names else "a write to an input"


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equal, NaN equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal within the rounding of another kernel for another size; NaN equal to NaN."""
    if a.shape != b.shape:
        return False
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return same(a, b)
    if a.numel() == 0:
        return True
    tolerance = 1e-4 if a.dtype.itemsize >= 4 else 3e-2
    finite = a[a.isfinite()]
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
