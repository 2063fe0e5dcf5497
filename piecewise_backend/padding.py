"""Is padding harmless? Tried, not assumed: the program runs with different rubbish in the padded rows.

Real rows must come out bitwise equal whatever the padded rows hold, and close to a run without padding (a program
may use its size as a number). Memory that the program writes is compared too, and put back. A caller's first values
may say little (a warm-up's zeros), so random ones are tried besides them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecewise_backend.cudagraph.capture import Padded, Step
from piecewise_backend.cudagraph.rows import RealRows, TokenDim, expanded_dims
from piecewise_backend.program import Program
from piecewise_backend.static_inputs import StaticInputs, default_rule

NUM_RUBBISH = 3

_Results = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Trial:
    """What every trial of one proof shares."""

    program: Program
    static: StaticInputs
    """Buffers of the padded size."""
    rules: Sequence[str]
    size: int
    saved: SavedState

    @property
    def dim(self) -> TokenDim:
        return self.program.token_dim


def why_padding_matters(
    program: Program,
    args: Sequence[Any],
    static: StaticInputs,
    rules: Sequence[str],
    count: int,
    size: int,
    *,
    thorough: bool,
) -> str | None:
    """Why a real row depends on padding when `count` rows are padded to `size`; None when none does.

    `thorough`: besides the caller's values and fewer of its rows, try random values. Memory that the program writes
    is left as it was.
    """
    trial = Trial(program, static, rules, size, SavedState(program, args))
    fewer = [_cut(program, args, size // 2)] if 2 <= size // 2 < count else []
    random = [_randomized(program, static, args, sign) for sign in (1, -1)] if thorough else []
    try:
        for tried, values in enumerate((args, *random, *fewer)):
            real = size // 2 if tried > len(random) else count
            why = _try_values(trial, values, real)
            if why is not None:
                return why
    finally:
        trial.saved.restore()
    return None


class SavedState:
    """Copies of the inputs that a program writes to; on the host where the device has no room for them."""

    def __init__(self, program: Program, args: Sequence[Any]) -> None:
        written = [(i.name, a) for i, a in zip(program.inputs, args, strict=True) if i.is_written]
        # What repeats the same memory cannot be written as it is; it shares it with another input that is.
        self.named = [(name, tensor) for name, tensor in written if not expanded_dims(tensor)]
        self.copies = [_copy(tensor) for _, tensor in self.named]

    def restore(self) -> None:
        for (_, tensor), saved in zip(self.named, self.copies, strict=True):
            tensor.copy_(saved)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return tensor.cpu()


def says_nothing(program: Program, args: Sequence[Any], rules: Sequence[str]) -> str | None:
    """The input of a call that can prove nothing.

    Integers are only tried at values that occur, since they may be indices: where all are 0, no other is tried.
    """
    for given, value, rule in zip(program.inputs, args, rules, strict=True):
        padded = program.token_dim.dims(given.fake) and not _is_known(rule, given.fake)
        if padded and _may_be_index(given.fake) and not value.any():
            return given.name
    return None


def _may_be_index(fake: torch.Tensor) -> bool:
    return not (fake.dtype.is_floating_point or fake.dtype.is_complex or fake.dtype is torch.bool)


def _is_known(rule: str, fake: torch.Tensor) -> bool:
    """Whether a declared rule, not the default, says what padded rows hold."""
    return rule not in ("leave", default_rule(fake))


def _cut(program: Program, args: Sequence[Any], count: int) -> list[Any]:
    """The first `count` rows of each input, laid out as a caller's own tensor would be."""
    result = []
    for given, value in zip(program.inputs, args, strict=True):
        cut = program.token_dim.narrow(value, given.fake, count)
        if isinstance(cut, torch.Tensor) and cut.shape != value.shape and not expanded_dims(value):
            fresh = program.token_dim.empty(given.fake, count)
            fresh.copy_(cut)
            cut = fresh
        result.append(cut)
    return result


def _randomized(program: Program, static: StaticInputs, args: Sequence[Any], sign: int) -> list[Any]:
    """The same call with random floats (or, by `sign`, their negatives) in the inputs that are copied."""
    generator = torch.Generator().manual_seed(0)  # the caller's random numbers are not to be used up
    result = list(args)
    for index in static.copied:
        value = args[index]
        if value.dtype.is_floating_point and not expanded_dims(value):
            drawn = torch.randn(value.shape, generator=generator) * sign
            result[index] = torch.empty_like(value)
            result[index].copy_(drawn)
    return result


def _try_values(trial: Trial, args: Sequence[Any], count: int) -> str | None:
    trial.saved.restore()
    exact = _results(trial, trial.program.run(args), count)
    first: _Results = []
    for kind in range(NUM_RUBBISH):
        results = _results(trial, _run_with_rubbish(trial, args, count, kind), count)
        if kind == 0:
            first = results
            if (name := _first_difference(exact, results, close)) is not None:
                return f"{name} at {count} rows differs from {count} rows padded to {trial.size}"
        elif (name := _first_difference(first, results, same)) is not None:
            piece = _blame(trial, args, count, kind)
            return f"{name} changes with the content of padded rows; the first to differ is {piece}"
    return None


def _run_with_rubbish(
    trial: Trial,
    args: Sequence[Any],
    count: int,
    kind: int,
    watch: Callable[[Step, Sequence[Any]], None] | None = None,
) -> tuple[Any, ...]:
    trial.saved.restore()
    _fill(trial, args, count, kind)
    rubbish = functools.partial(put_rubbish, kind=kind)
    padded = Padded(trial.dim, trial.size, RealRows(count), rubbish)
    return trial.program.run(trial.static.args, padded=padded, watch=watch)


def _fill(trial: Trial, args: Sequence[Any], count: int, kind: int) -> None:
    """Copy in, then put rubbish of one kind into padded rows, except where a declared rule says what they hold."""
    trial.static.bind(count)(args)
    for index, _, rows in trial.static.padded_rows(count):
        fake = trial.program.inputs[index].fake
        if _is_known(trial.rules[index], fake):
            continue
        put_rubbish(rows, args[index], kind)


def put_rubbish(rows: torch.Tensor, given: torch.Tensor, kind: int) -> None:
    """Fill `rows` with rubbish number `kind`; `given` holds valid values of their sort."""
    if rows.dtype.is_floating_point or rows.dtype.is_complex:
        large = min(torch.finfo(rows.dtype).max / 4, 1e30)
        rows.fill_((float("nan"), large, -large)[kind])
    elif rows.dtype is torch.bool:
        rows.fill_(kind != 1)
    elif kind == 0 or given.numel() == 0:
        rows.fill_(0)
    else:  # an index must stay valid, so only values that occur are used
        rows.copy_((given.amax() if kind == 1 else given.amin()).expand_as(rows))


def _results(trial: Trial, outputs: Sequence[Any], count: int) -> _Results:
    """Outputs cut to real rows, and written memory: (what, copy)."""
    found = []
    for index, (value, fake) in enumerate(zip(outputs, trial.program.output_fakes, strict=True)):
        if isinstance(value, torch.Tensor):
            found.append((f"output {index}", trial.dim.narrow(value, fake, count).clone()))
    return found + [(f"written input {name}", tensor.clone()) for name, tensor in trial.saved.named]


def _first_difference(
    one: _Results, other: _Results, equal: Callable[[torch.Tensor, torch.Tensor], bool]
) -> str | None:
    for (name, a), (_, b) in zip(one, other, strict=True):
        if not equal(a, b):
            return name
    return None


def _blame(trial: Trial, args: Sequence[Any], count: int, kind: int) -> str:
    """The first step whose real rows differ between rubbish 0 and rubbish `kind`."""
    seen: list[list[torch.Tensor]] = []
    dim = trial.dim

    def real_rows(step: Step, results: Sequence[Any]) -> list[torch.Tensor]:
        pairs = zip(results, step.output_fakes, strict=True)
        return [dim.narrow(v, f, count).clone() for v, f in pairs if isinstance(v, torch.Tensor)]

    _run_with_rubbish(trial, args, count, 0, watch=lambda step, results: seen.append(real_rows(step, results)))
    names: list[str] = []
    others = iter(seen)

    def compare(step: Step, results: Sequence[Any]) -> None:
        pairs = zip(next(others), real_rows(step, results), strict=True)
        if not all(same(a, b) for a, b in pairs):
            names.append(step.name)

    _run_with_rubbish(trial, args, count, kind, watch=compare)
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
