"""Random models through mrv2 against eager, and against the same compiled code without graphs.

    python -m tests.fuzz.differential --models 500 --seed 0 [--compiler eager|aot_eager|inductor]
        [--device cpu|cuda]

Of every call:

(a) against the model run eagerly on copies of its arguments: results, arguments and buffers that were written are
    close, and results share memory with arguments, state and each other exactly where they do in eager. Results of
    earlier calls are kept (or overwritten, as a caller may) and checked again at the end: none may have changed.
(b) of a call that captured or replayed, bitwise: `Program.run` is given copies of the arguments, padded to the size of
    the graph that served the call. The same kernels at the same sizes, without graphs: real rows and written memory
    must have the same bits, whatever the graph's padded rows and memory held.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from rich.progress import track
from torch.utils._pytree import tree_leaves

from piecewise_backend.backend import mrv2
from piecewise_backend.cudagraph.capture import Padded
from piecewise_backend.cudagraph.rows import RealRows
from piecewise_backend.plain import PlainCaller
from piecewise_backend.reasons import ReasonCode
from piecewise_backend.reporting.report import Report
from piecewise_backend.static_inputs import StaticInputs
from tests.fuzz.models import Arguments, Model, Spec, random_spec, smaller_specs
from tests.fuzz.operators import register_breakpoints


class Mismatch(AssertionError):
    """mrv2 and the reference differ."""


class EagerFails(Exception):
    """The model itself does not run: nothing to compare."""


def run_spec(spec: Spec, device: str = "cpu") -> Counter[str]:
    """Run all calls of `spec`. Returns how often each event occurred; raises Mismatch, or what mrv2 raised.

    On "cuda" real graphs are recorded; elsewhere the recorder is the emulated one.
    """
    register_breakpoints()
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    ours, reference = Model(spec).to(device), Model(spec).to(device)
    reports: list[Report] = []
    options = spec.options | {"recorder": "cuda" if device == "cuda" else "emulated"}
    compiled = torch.compile(ours, backend=_checked_backend(reports), options=options)
    arguments = Arguments(spec, device)
    earlier: list[tuple[str, Any, list[torch.Tensor | None]]] = []
    for index, call in enumerate(spec.calls):
        given = arguments.make(call)
        reference_args = copy.deepcopy(given)
        want = _run_eagerly(reference, reference_args, call.inference)
        if spec.marked:
            arguments.mark(given)
        with torch.inference_mode() if call.inference else torch.no_grad():
            got = compiled(*given.values())
        where = f"call {index} ({call})"
        _compare_call(where, got, want, _state(ours, given), _state(reference, reference_args))
        if index % 2:
            _scribble(got, want, _state(ours, given), _state(reference, reference_args))
        else:
            earlier.append((where, got, _snapshot(got, _state(ours, given))))
        _follow(ours, reference)
    for where, got, kept in earlier:
        for position, (now, then) in enumerate(zip(tree_leaves(got), kept, strict=True)):
            if then is not None and not _same(now, then):
                raise Mismatch(f"result {position} of {where} was changed by a later call")
    _refuse_failed_captures(reports)
    return _events(reports)


def _refuse_failed_captures(reports: Sequence[Report]) -> None:
    """Nothing in these models may make a recording fail: what cannot be recorded is known beforehand."""
    for report in reports:
        for reason, _ in report.reasons:
            if reason.code is ReasonCode.CAPTURE_FAILED or "does not run on padded rows" in reason.detail:
                raise Mismatch(f"a capture failed: {reason}")


def _run_eagerly(model: Model, args: dict[str, Any], inference: bool) -> Any:
    try:
        with torch.inference_mode() if inference else torch.no_grad():
            return model(*args.values())
    except Exception as error:
        raise EagerFails(str(error)) from error


# (a) against eager


def _state(model: Model, args: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {name: a for name, a in args.items() if isinstance(a, torch.Tensor)}
    return tensors | {f"self.{n}": t for n, t in [*model.named_parameters(), *model.named_buffers()]}


def _compare_call(where: str, got: Any, want: Any, ours: dict[str, Any], reference: dict[str, Any]) -> None:
    results, expected = tree_leaves(got), tree_leaves(want)
    if len(results) != len(expected):
        raise Mismatch(f"{where}: {len(results)} results, eager has {len(expected)}")
    for index, (one, other) in enumerate(zip(results, expected, strict=True)):
        if (why := _why_different(one, other)) is not None:
            raise Mismatch(f"{where}: result {index}: {why}")
    for name in ours:
        if (why := _why_different(ours[name], reference[name])) is not None:
            raise Mismatch(f"{where}: after the call, {name}: {why}")
    if _sharing(results, list(ours.values())) != _sharing(expected, list(reference.values())):
        names = [f"result {i}" for i in range(len(results))] + list(ours)
        pairs = _sharing(results, list(ours.values())) ^ _sharing(expected, list(reference.values()))
        a, b = sorted(pairs)[0]
        raise Mismatch(f"{where}: {names[a]} and {names[b]} share memory in one of mrv2 and eager only")


def _why_different(got: Any, want: Any) -> str | None:
    if not isinstance(want, torch.Tensor):
        return None if type(got) is type(want) and got == want else f"got {got!r}, eager {want!r}"
    if not isinstance(got, torch.Tensor):
        return f"got a {type(got).__name__}, eager a tensor"
    for attribute in ("dtype", "shape"):
        if getattr(got, attribute) != getattr(want, attribute):
            return f"{attribute} is {getattr(got, attribute)}, in eager {getattr(want, attribute)}"
    if got.stride() != want.stride() and got.numel() > 1:
        return f"strides are {got.stride()}, in eager {want.stride()}"
    if not want.is_floating_point():
        return None if torch.equal(got, want) else f"got {got.flatten()[:8]}, eager {want.flatten()[:8]}"
    finite = want[want.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    tolerance = 2e-4 if want.dtype.itemsize >= 4 else 2e-2
    if torch.allclose(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        return None
    return f"differs by {float((got.double() - want.double()).abs().nan_to_num(nan=float('inf')).max()):.3g}"


def _storage(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) and value.numel() else 0


def _sharing(results: Sequence[Any], state: Sequence[Any]) -> set[tuple[int, int]]:
    """Pairs (result, other value) that share memory."""
    storages = [_storage(v) for v in (*results, *state)]
    return {
        (i, j)
        for i in range(len(results)) for j in range(i + 1, len(storages))
        if storages[i] and storages[i] == storages[j]
    }  # fmt: skip


def _fresh(results: Sequence[Any], state: dict[str, Any]) -> list[torch.Tensor | None]:
    held = {_storage(t) for t in state.values()}
    return [r if isinstance(r, torch.Tensor) and _storage(r) not in held else None for r in results]


def _snapshot(got: Any, state: dict[str, Any]) -> list[torch.Tensor | None]:
    """Copies of the results that are the caller's own; None for those that lie in an argument or in the state."""
    return [r if r is None else r.clone() for r in _fresh(tree_leaves(got), state)]


def _scribble(got: Any, want: Any, ours: dict[str, Any], reference: dict[str, Any]) -> None:
    """A caller may do with results as it likes."""
    for results, state in ((got, ours), (want, reference)):
        for result in _fresh(tree_leaves(results), state):
            if result is not None and 0 not in result.stride() and not result.is_inference():
                result.zero_()


def _follow(ours: Model, reference: Model) -> None:
    """The reference goes on from the same state, so that rounding does not add up."""
    with torch.no_grad():
        for mine, its in zip(ours.buffers(), reference.buffers(), strict=True):
            its.copy_(mine)


# (b) against the same code without graphs


def _checked_backend(reports: list[Report]) -> Callable[..., Any]:
    def backend(gm: torch.fx.GraphModule, example_inputs: Any, *, options: Any) -> Callable[..., Any]:
        function = mrv2(gm, example_inputs, options=options)
        reports.append(function.report)
        if not isinstance(function.caller, PlainCaller):
            return function

        def checked(*args: Any) -> Any:
            copies = copy.deepcopy(args)
            before = {id(s): s.replays for s in function.report.sizes}
            got = function(*args)
            served = [s for s in function.report.sizes if before.get(id(s), -1) != s.replays]
            if served:
                _compare_bits(function.caller, served[0].num_tokens, args, copies, got)
            return got

        return checked

    return backend


def _compare_bits(caller: PlainCaller, size: int, args: Sequence[Any], copies: Sequence[Any], got: Any) -> None:
    program, dim = caller.program, caller.program.token_dim
    count = next((a for i, a in zip(program.inputs, args, strict=True) if isinstance(i.fake, torch.SymInt)), 0)
    if size == count or not count:
        want = program.run(copies)
    else:
        static = StaticInputs(program.inputs, caller.copied, copies, caller.rules, dim=dim, size=size)
        static.bind(count)(copies)
        padded = program.run(static.args, padded=Padded(dim, size, RealRows(count)))
        want = tuple(dim.narrow(v, f, count) for v, f in zip(padded, program.output_fakes, strict=True))
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        if isinstance(other, torch.Tensor) and not _same(one, other):
            raise Mismatch(f"output {index} of the graph at {count} rows has other bits than the same code at {size}")
    for given, one, other in zip(program.inputs, args, copies, strict=True):
        if given.is_written and not _same(one, other):
            raise Mismatch(f"written input {given.name} at {count} rows has other bits than the same code at {size}")


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return a == b
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _events(reports: Sequence[Report]) -> Counter[str]:
    events: Counter[str] = Counter(models=1, programs=len(reports))
    for report in reports:
        events["captures"] += report.num_captures
        events["replays"] += report.num_replays
        events["runs without graphs"] += report.uncaptured_runs
        events["padded replays"] += sum(s.replays for s in report.sizes if s.padded_rows)
        events["full captures"] += sum(not s.eager_ops for s in report.sizes)
        events["piecewise captures"] += sum(bool(s.eager_ops) for s in report.sizes)
        for reason, count in report.reasons:
            events[str(reason.code)] += count
    return events


# Many models


def failure(spec: Spec, device: str = "cpu") -> Exception | None:
    """What goes wrong with `spec`; None when nothing does, or when it fails in eager too."""
    try:
        run_spec(spec, device)
    except EagerFails:
        return None
    except Exception as error:
        return error
    return None


def shrink(spec: Spec, device: str = "cpu") -> Spec:
    """A smaller spec that fails in the same way."""
    kind = type(failure(spec, device))
    smaller = True
    while smaller:
        smaller = False
        for candidate in smaller_specs(spec):
            if type(failure(candidate, device)) is kind:
                spec, smaller = candidate, True
                break
    return spec


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=500, help="how many models (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="the first model's seed; the others follow (default: 0)")
    parser.add_argument("--compiler", choices=("eager", "aot_eager", "inductor"), default="eager")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: real graphs (default: cpu)")
    parser.add_argument("--keep-going", action="store_true", help="list every failing seed; shrink none")
    args = parser.parse_args(argv)
    events: Counter[str] = Counter()
    failing: list[int] = []
    for seed in _progress(range(args.seed, args.seed + args.models)):
        spec = random_spec(seed, compiler=args.compiler)
        try:
            events += run_spec(spec, args.device)
        except EagerFails:  # a view of a tensor with other strides, mostly
            events["models that eager cannot run"] += 1
        except Exception as error:
            failing.append(seed)
            print(f"\nseed {seed} fails: {type(error).__name__}: {str(error)[:2000]}", file=sys.stderr)
            if not args.keep_going:
                small = shrink(spec, args.device)
                print(
                    f"smallest found, failing with: {failure(small, args.device)}\n{small.describe()}", file=sys.stderr
                )
                return 1
    print(", ".join(f"{name}: {count}" for name, count in sorted(events.items())))
    if failing:
        print(f"failing seeds: {failing}", file=sys.stderr)
    return 1 if failing else 0


def _progress(seeds: Sequence[int]) -> Iterator[int]:
    return iter(track(seeds, description="models", disable=not sys.stderr.isatty()))


if __name__ == "__main__":
    sys.exit(main())
