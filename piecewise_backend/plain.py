"""Plain callers: a compiled graph called with whatever tensors come, captured as sizes repeat.

One call: find the variant for its (sizes, addresses), copy the inputs in, replay, hand out results of the caller's
own. A call without a variant is planned: it runs compiled, with a reason, or captures its size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecewise_backend.config import Options
from piecewise_backend.cudagraph.capture import CapturedProgram, Padded, Step, capture_session
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.cudagraph.recorder import GraphRecorder
from piecewise_backend.cudagraph.rows import RealRows
from piecewise_backend.cudagraph.sizes import smallest_fitting
from piecewise_backend.outputs import OutputPlan
from piecewise_backend.padding import SavedState, why_padding_matters
from piecewise_backend.program import Program
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.report import Report, SizeReport
from piecewise_backend.static_inputs import StaticInputs, default_rule

logger = logging.getLogger(__name__)

_MANY_SIGHTINGS = 4096


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


class PlainCaller:
    """Calls one program on a caller's tensors, through graphs made by `recorder`."""

    def __init__(
        self, program: Program, gm: fx.GraphModule, options: Options, recorder: GraphRecorder, report: Report,
        sizes: tuple[int, ...],
    ) -> None:
        self.program, self.options, self.recorder, self.report = program, options, recorder, report
        self.dim = program.token_dim
        self.mode = CUDAGraphMode.parse(options.mode)
        self._traced_graph = gm
        inputs = program.inputs
        self._ints = [i for i, given in enumerate(inputs) if isinstance(given.fake, torch.SymInt)]
        own = own_address_inputs(program)
        self._pinned = tuple(own)
        self._moving = [i for i in own if not inputs[i].is_static]
        self._copied = [i for i, g in enumerate(inputs) if isinstance(g.fake, torch.Tensor) and i not in own]
        self._tensors = [i for i, g in enumerate(inputs) if isinstance(g.fake, torch.Tensor) and not g.is_static]
        self._alias_pattern = _pattern([inputs[i].storage for i in self._tensors]) if self._moving else None
        self._rules = [padding_rule(options.padding, g.name, g.fake) for g in inputs]
        self._sizes = sizes if self._can_pad() else ()
        self.outputs = OutputPlan(program, gm, own)
        self._variants: dict[Any, tuple[Variant, int]] = {}
        self._by_target: dict[Target, Variant] = {}
        self._failed: set[Target] = set()
        self._sightings: dict[Target, int] = {}
        self._proved: set[int] = set()
        self._sizes_captured: set[int] = set()

    # The replay path: nothing below `_replay` runs again for a call that has a variant.

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        if self._alias_pattern is not None and _pattern(self._storages(args)) != self._alias_pattern:
            return self._run_as_traced(args)
        key = (*[args[i] for i in self._ints], *[args[i].data_ptr() for i in self._moving])
        found = self._variants.get(key)
        if found is None:
            return self._plan(key, args)
        variant, count = found
        if not same_addresses(args, variant.addresses, self._pinned):
            return self._capture_again(key, args, variant)
        return self._replay(variant, count, args)

    def _replay(self, variant: Variant, count: int, args: Sequence[Any]) -> tuple[Any, ...]:
        variant.static.copy_in(args, count)
        variant.rows.count = count
        static = variant.captured.replay()
        variant.report.replays += 1
        variant.report.padded_rows += variant.target.size - count
        return self.outputs.hand_out(static, args, count)

    def _run_compiled(self, args: Sequence[Any]) -> tuple[Any, ...]:
        self.report.uncaptured_runs += 1
        return self.program.run(args)

    def _run_as_traced(self, args: Sequence[Any]) -> tuple[Any, ...]:
        self._note(
            ReasonCode.INPUTS_ALIAS, "inputs", "they share memory in another pattern than when the graph was traced",
            "pass tensors that overlap in the same way at every call",
        )
        self.report.uncaptured_runs += 1
        with torch.no_grad():
            return tuple(self._traced_graph(*args))

    # Planning: the first calls of a size.

    def _plan(self, key: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        count = args[self._ints[0]] if self._ints else 0
        target = self._target(key, count)
        if target is None or target in self._failed:
            return self._run_compiled(args)
        variant = self._by_target.get(target)
        if variant is None and not self._is_due(target):
            return self._run_compiled(args)
        if target.size != count and not self._padding_is_proved(target.size, args, count):
            return self._plan(key, args)  # sizes are exact from here on
        if variant is None:
            return self._capture(key, target, args, count)
        self._variants[key] = (variant, count)
        return self(*args)

    def _target(self, key: Any, count: int) -> Target | None:
        """What to capture for a call; None: run it compiled, for a reason now in the report."""
        sizes, addresses = key[: len(self._ints)], key[len(self._ints) :]
        if not self._sizes:
            return Target(count, True, sizes, addresses)
        size = smallest_fitting(self._sizes, count)
        if size is None:
            self._note(
                ReasonCode.ABOVE_ALL_SIZES, f"{count} rows", f"more than the largest capture size {self._sizes[-1]}",
                "add it to options={'capture_sizes': [...]}",
            )
            return None
        waste = (size - count) / size
        if waste > self.options.max_padding_waste:
            self._note(
                ReasonCode.TOO_MUCH_PADDING, f"{count} rows", f"padding to {size} wastes {waste:.0%}",
                "add a size to options={'capture_sizes': [...]}, or raise max_padding_waste",
            )
            return None
        exact = size == count and any(step.wants_real_rows for step in self.program.breakpoints)
        return Target(size, exact, sizes if exact else (), addresses)

    def _is_due(self, target: Target) -> bool:
        if len(self._sightings) > _MANY_SIGHTINGS:  # addresses that never come again
            self._sightings.clear()
        seen = self._sightings[target] = self._sightings.get(target, 0) + 1
        if seen < self.options.capture_after:
            after = self.options.capture_after
            self._note(ReasonCode.NOT_SEEN_TWICE, "new sizes", f"ran compiled: a size is captured at its call {after}")
            return False
        if self.report.num_captures >= self.options.max_captures:
            self._note(
                ReasonCode.TOO_MANY_CAPTURES, "captures", f"there are {self.report.num_captures} variants already",
                "raise options={'max_captures': ...}, or give fewer capture_sizes",
            )
            return False
        return True

    def _padding_is_proved(self, size: int, args: Sequence[Any], count: int) -> bool:
        if size in self._proved:
            return True
        static = StaticInputs(self.program.inputs, self._copied, self.dim, size, args, self._rules)
        why = why_padding_matters(self.program, args, static, count, size)
        if why is None:
            self._proved.add(size)
            return True
        self._sizes = ()
        self._note(ReasonCode.CROSS_ROW, "padding", f"{why}: sizes are captured exactly from now on")
        return False

    def _can_pad(self) -> bool:
        inputs = self.program.inputs
        symbols = {i.fake.node.expr for i in inputs if isinstance(i.fake, torch.SymInt)}
        if len(symbols) > 1:
            self._note(
                ReasonCode.SEVERAL_DYNAMIC_DIMS, "sizes",
                f"{len(symbols)} independent dynamic dimensions: sizes are captured exactly",
                "keep all but one dimension fixed (torch._dynamo.mark_static)",
            )
        elif self.program.is_random and symbols:
            self._note(ReasonCode.CROSS_ROW, "padding", "the model draws random numbers: sizes are captured exactly")
        padding_would_break = any(step.wants_real_rows for step in self.program.breakpoints)
        return (
            len(symbols) == 1
            and not self.program.is_random
            and not any(self.dim.dims(inputs[i].fake) for i in self._pinned)
            and (self.mode.mixed is CUDAGraphMode.PIECEWISE or not padding_would_break)
        )

    # Capturing.

    def _capture(self, key: Any, target: Target, args: Sequence[Any], count: int) -> tuple[Any, ...]:
        breaks = self._breaks(target)
        if breaks is None:
            return self._run_compiled(args)
        self._note_moved(target)
        static = StaticInputs(self.program.inputs, self._copied, self.dim, target.size, args, self._rules)
        rows = RealRows(count)
        padded = Padded(self.dim, target.size, rows) if self._sizes and not target.exact else None
        saved = None
        try:
            saved = SavedState(self.program, args)
            static.copy_in(args, count)
            with capture_session(self.recorder), torch.no_grad():
                captured = self.program.capture(
                    static.args, recorder=self.recorder, records=lambda s: not breaks(s), execute=True, padded=padded
                )
        except Exception as error:
            if saved is not None:
                saved.restore()
            return self._drop(error, target, args)
        variant = Variant(captured, static, rows, target, self._size_report(captured, target), _addresses(args))
        self._by_target[target] = variant
        self._variants[key] = (variant, count)
        return self.outputs.hand_out(captured.outputs, args, count)

    def _breaks(self, target: Target) -> Callable[[Step], bool] | None:
        """Which breakpoints break the graphs of `target`; None where the mode wants no graph that is broken."""
        records_full = self.mode.decode is CUDAGraphMode.FULL

        def breaks(step: Step) -> bool:
            assert step.breakpoint is not None
            narrowed = step.wants_real_rows and bool(self._sizes) and not target.exact
            return not records_full or not step.breakpoint.capturable or narrowed

        steps = self.program.steps
        broken = [s.name for s in steps if (breaks(s) if s.breakpoint else s.forbidden is not None)]
        if broken and self.mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE):
            self._note(
                ReasonCode.MODE_ADAPTED, _sizes_text(target), f"mode {self.mode.name} and {broken[0]} must break",
                "ask for mode FULL_AND_PIECEWISE",
            )
            self._failed.add(target)
            return None
        return breaks

    def _drop(self, error: Exception, target: Target, args: Sequence[Any]) -> tuple[Any, ...]:
        """Recording failed: this target alone runs compiled from now on."""
        self._failed.add(target)
        out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        self._note(
            ReasonCode.OUT_OF_MEMORY if out_of_memory else ReasonCode.CAPTURE_FAILED, _sizes_text(target),
            f"{type(error).__name__}: {error}", "it runs compiled; the other sizes are not affected",
        )
        return self._run_compiled(args)

    def _capture_again(self, key: Any, args: Sequence[Any], variant: Variant) -> tuple[Any, ...]:
        moved = [self.program.inputs[i].name for i in self._pinned if variant.addresses[i] != _address(args[i])]
        self._note(
            ReasonCode.INPUT_MOVED, moved[0], f"{len(moved)} recorded tensor(s) moved: captured again",
            "update parameters in place instead of replacing them",
        )
        self.report.sizes.remove(variant.report)
        self._by_target.pop(variant.target, None)
        self._variants = {k: v for k, v in self._variants.items() if v[0] is not variant}
        return self._plan(key, args)

    def _note_moved(self, target: Target) -> None:
        if any(t.size == target.size and t.sizes == target.sizes for t in self._by_target):
            name = self.program.inputs[self._moving[0]].name if self._moving else "input"
            if self._moving:
                self._note(
                    ReasonCode.INPUT_MOVED, name, "it is written by the model and is elsewhere now: captured again",
                    "keep one tensor and write into it",
                )

    def _size_report(self, captured: CapturedProgram, target: Target) -> SizeReport:
        mode = CUDAGraphMode.PIECEWISE if captured.eager else CUDAGraphMode.FULL
        sizes = target.size or "fixed"
        text = f"{mode.name}, {'exactly ' if target.exact else ''}{sizes} rows"
        report = SizeReport(
            descriptor=text if target.size else f"{mode.name}, fixed sizes", num_tokens=target.size,
            num_graphs=captured.num_graphs, seconds=captured.seconds, memory_bytes=captured.memory_bytes,
            eager_ops=captured.eager,
        )
        self.report.sizes.append(report)
        logger.info("captured %s: %d graphs in %.0f ms", text, captured.num_graphs, captured.seconds * 1e3)
        return report

    def _storages(self, args: Sequence[Any]) -> list[int]:
        return [args[i].untyped_storage().data_ptr() if args[i].numel() else -1 - i for i in self._tensors]

    def _note(self, code: ReasonCode, subject: str, detail: str, hint: str = "") -> None:
        self.report.reasons.add(Reason(code, subject, detail, hint))


def own_address_inputs(program: Program) -> list[int]:
    """Inputs recorded where they are: parameters, and whatever shares memory with something the program writes."""
    written = {i.storage for i in program.inputs if i.is_written}
    return [
        n for n, i in enumerate(program.inputs)
        if isinstance(i.fake, torch.Tensor) and (i.is_static or i.storage in written)
    ]


def padding_rule(padding: Any, name: str, fake: Any) -> str:
    """The declared rule for an input, or the default of its dtype."""
    if isinstance(padding, str):
        return padding
    for asked, rule in (padding or {}).items():
        if name == asked or name.strip("_").removeprefix("l_") == asked:
            return rule
    return default_rule(fake) if isinstance(fake, torch.Tensor) else "leave"


def same_addresses(args: Sequence[Any], addresses: list[int], indices: tuple[int, ...]) -> bool:
    """Whether the tensors at `indices` still lie at `addresses` (one per argument)."""
    if _same_addresses_native is not None:
        return _same_addresses_native(list(args), addresses, list(indices))
    return all(args[i].data_ptr() == addresses[i] for i in indices)


# Present in CUDA builds only.
_same_addresses_native = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def _addresses(args: Sequence[Any]) -> list[int]:
    return [_address(a) for a in args]


def _address(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else 0


def _pattern(storages: Sequence[int]) -> tuple[int, ...]:
    """Which of the storages are the same one: (a, b, a) -> (0, 1, 0)."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(s, n) for n, s in enumerate(storages))


def _sizes_text(target: Target) -> str:
    return f"{target.size} rows" if target.size else "fixed sizes"
