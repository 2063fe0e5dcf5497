"""Plain callers: a compiled graph called with whatever tensors come, captured as sizes repeat.

One call: find the variant for its (sizes, addresses), copy the inputs in, replay, hand out results of the caller's
own. A call without a variant is planned: it runs compiled, with a reason, or captures its size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from piecewise_backend.config import Options
from piecewise_backend.cudagraph.capture import (
    CapturedProgram,
    Padded,
    Step,
    capture_session,
    failure_reason,
    is_out_of_memory,
)
from piecewise_backend.cudagraph.modes import CUDAGraphMode
from piecewise_backend.cudagraph.recorder import GraphRecorder, unowned_all
from piecewise_backend.cudagraph.rows import RealRows
from piecewise_backend.cudagraph.sizes import smallest_fitting
from piecewise_backend.outputs import OutputPlan
from piecewise_backend.padding import SavedState, says_nothing, why_padding_matters
from piecewise_backend.program import Program
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.report import Report, SizeReport
from piecewise_backend.static_inputs import StaticInputs, StaticMemory, padding_rule, plain_name, unused_padding
from piecewise_backend.variants import (
    Bound,
    Target,
    Variant,
    address_of,
    addresses_of,
    aliases_as_traced,
    differs_in_addresses_only,
    own_address_inputs,
    same_addresses,
    sizes_text,
    written_storages,
)

logger = logging.getLogger(__name__)

_MANY_SIGHTINGS = 4096


class PlainCaller:
    """Calls one program on a caller's tensors, through graphs made by `recorder`."""

    def __init__(
        self,
        program: Program,
        gm: fx.GraphModule,
        options: Options,
        recorder: GraphRecorder,
        report: Report,
        sizes: tuple[int, ...],
    ) -> None:
        self.program, self.options, self.recorder, self.report = program, options, recorder, report
        self.dim = program.token_dim
        self.mode = CUDAGraphMode.parse(options.mode)
        self._traced_graph = gm
        inputs = program.inputs
        self._ints = [i for i, given in enumerate(inputs) if isinstance(given.fake, torch.SymInt)]
        self._tensors = [i for i, given in enumerate(inputs) if isinstance(given.fake, torch.Tensor)]
        self._pinned = own_address_inputs(program)
        self._moving = [i for i in self._pinned if not inputs[i].is_static]
        self.copied = [i for i in self._tensors if i not in self._pinned]
        self.rules = [padding_rule(options.padding, g.name, g.fake) for g in inputs]
        for name in unused_padding(options.padding, (g.name for g in inputs)):
            known = ", ".join(repr(plain_name(inputs[i].name)) for i in self._tensors if not inputs[i].is_static)
            hint = f"this graph's inputs are {known}"
            self._note(ReasonCode.PADDING_UNUSED, f"padding of {name!r}", "there is no such input", hint)
        self._written = written_storages(program)
        # Operators that are given real rows break padded graphs, but may be recorded where every row is real.
        self._records_more_exactly = self.mode.decode is CUDAGraphMode.FULL and any(
            step.wants_real_rows and step.breakpoint is not None and step.breakpoint.capturable
            for step in program.breakpoints
        )
        self._can_capture = self._check_sizes_known()
        self._sizes = sizes if self._can_pad() else ()
        self._memory = StaticMemory(self._sizes[-1] if self._sizes else 0)
        self.outputs = OutputPlan(program, gm, self._pinned)
        self._bound: dict[Any, Bound] = {}
        self._by_target: dict[Target, Variant] = {}
        self._failed: set[Target] = set()
        self._sightings: dict[Target, int] = {}
        self._proved: set[int] = set()

    # The replay path: a call of a size and addresses that were bound before.

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        key = (*[args[i] for i in self._ints], *[args[i].data_ptr() for i in self._moving])
        bound = self._bound.get(key)
        if bound is None:
            return self._plan(key, args)
        if not same_addresses(args, bound.variant.addresses, self._pinned):
            return self._capture_again(key, args, bound.variant)
        if bound.written and any(args[i].untyped_storage().data_ptr() in bound.written for i in self.copied):
            return self._run_as_traced(args)
        return self._replay(bound, args)

    def _replay(self, bound: Bound, args: Sequence[Any]) -> tuple[Any, ...]:
        variant = bound.variant
        bound.copy_in(args)
        variant.rows.count = bound.count
        variant.captured.replay()
        variant.report.replays += 1
        variant.report.padded_rows += variant.target.size - bound.count
        return bound.hand_out(args)

    def _run_compiled(self, args: Sequence[Any]) -> tuple[Any, ...]:
        self.report.uncaptured_runs += 1
        return self.program.run(args)

    def _run_as_traced(self, args: Sequence[Any]) -> tuple[Any, ...]:
        self._note(
            ReasonCode.INPUTS_ALIAS,
            "inputs",
            "they share memory in another pattern than when the graph was traced",
            "pass tensors that overlap in the same way at every call",
        )
        self.report.uncaptured_runs += 1
        with torch.no_grad():
            return tuple(self._traced_graph(*args))

    # Planning: the first calls of a size.

    def _plan(self, key: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        if not aliases_as_traced(self.program, args):
            return self._run_as_traced(args)
        count = args[self._ints[0]] if self._ints else 0
        target = self._target(key, count)
        if target is None or not self._is_wanted(target):
            return self._run_compiled(args)
        if target.size != count and target.size not in self._proved:
            target = self._prove(target, key, args, count)
            if target is None or not self._is_wanted(target):
                return self._run_compiled(args)
        if target not in self._by_target:
            return self._capture(key, target, args, count)
        self._bind(key, self._by_target[target], args, count)
        return self(*args)

    def _is_wanted(self, target: Target) -> bool:
        """Whether a graph is there for `target`, or is to be captured now."""
        return target in self._by_target or (target not in self._failed and self._is_due(target))

    def _target(self, key: Any, count: int) -> Target | None:
        """What to capture for a call; None: run it compiled, for a reason now in the report."""
        if not self._can_capture:
            return None
        sizes, addresses = key[: len(self._ints)], key[len(self._ints) :]
        if not self._sizes:
            return Target(count, True, sizes, addresses)
        size = smallest_fitting(self._sizes, count)
        if size is None:
            self._note(
                ReasonCode.ABOVE_ALL_SIZES,
                f"more than {self._sizes[-1]} rows",
                "above the largest capture size",
                "add it to options={'capture_sizes': [...]}",
            )
            return None
        if (size - count) / size > self.options.max_padding_waste:
            self._note(
                ReasonCode.TOO_MUCH_PADDING,
                f"padding to {size} rows",
                f"would waste more than {self.options.max_padding_waste:.0%}",
                "add a size to options={'capture_sizes': [...]}, or raise max_padding_waste",
            )
            return None
        exact = size == count and self._records_more_exactly
        return Target(size, exact, sizes if exact else (), addresses)

    def _is_due(self, target: Target) -> bool:
        if len(self._sightings) > _MANY_SIGHTINGS:  # addresses that never come again
            self._sightings.clear()
            self._failed.clear()
        seen = self._sightings[target] = self._sightings.get(target, 0) + 1
        if seen < self.options.capture_after:
            after = self.options.capture_after
            self._note(ReasonCode.NOT_SEEN_TWICE, "new sizes", f"ran compiled: a size is captured at its call {after}")
            return False
        if self.report.num_captures >= self.options.max_captures and not self._replaces_another(target):
            self._note(
                ReasonCode.TOO_MANY_CAPTURES,
                "captures",
                f"there are {self.report.num_captures} variants already",
                "raise options={'max_captures': ...}, or give fewer capture_sizes",
            )
            return False
        return True

    def _prove(self, target: Target, key: Any, args: Sequence[Any], count: int) -> Target | None:
        """Try whether padding is harmless. Returns what to capture now, given the answer; None: nothing."""
        exact = Target(count, True, key[: len(self._ints)], target.addresses)
        name = says_nothing(self.program, args, self.rules)
        if name is not None:
            self._note(
                ReasonCode.CROSS_ROW,
                name,
                "all of it is 0, which proves nothing: this call's size is taken exactly",
                f"call the model with other values, or declare options={{'padding': {{{name!r}: 'zero'}}}}",
            )
            return exact
        try:
            with torch.no_grad():
                static = self._static_inputs(target.size, args)
                why = why_padding_matters(
                    self.program, args, static, self.rules, count, target.size, thorough=not self._proved
                )
        except Exception as error:
            if is_out_of_memory(error):
                self._drop(error, target)
                return None
            why = f"the model does not run on padded rows ({type(error).__name__}: {error})"
        if why is None:
            self._proved.add(target.size)
            return target
        # What was proved for other sizes was by chance.
        self._sizes = ()
        self._bound = {k: b for k, b in self._bound.items() if b.count == b.variant.target.size}
        self._note(ReasonCode.CROSS_ROW, "padding", f"{why}: sizes are captured exactly from now on")
        return exact

    def _check_sizes_known(self) -> bool:
        """Graphs have fixed sizes, so none can be made where the data decides a size or a number between steps."""
        for step in self.program.steps:
            if any(not self.dim.decides(fake) for fake in step.output_fakes):
                self._note(
                    ReasonCode.PIECE_NOT_CAPTURABLE,
                    step.name,
                    "a result's size, or a number, depends on data: the whole graph runs without graphs",
                    "break the graph there (torch._dynamo.graph_break())",
                )
                return False
        return True

    def _can_pad(self) -> bool:
        inputs = self.program.inputs
        symbols = {i.fake.node.expr for i in inputs if isinstance(i.fake, torch.SymInt)}
        if len(symbols) > 1:
            self._note(
                ReasonCode.SEVERAL_DYNAMIC_DIMS,
                "sizes",
                f"{len(symbols)} independent dynamic dimensions: sizes are captured exactly",
                "keep all but one dimension fixed (torch._dynamo.mark_static)",
            )
        elif self.program.is_random and symbols:
            self._note(ReasonCode.CROSS_ROW, "padding", "the model draws random numbers: sizes are captured exactly")
        padding_would_break = any(step.wants_real_rows for step in self.program.breakpoints)
        return (
            len(symbols) == 1
            and not self.program.is_random
            and any(self.dim.dims(inputs[i].fake) for i in self.copied)  # else the int is a number, not a size
            and not any(self.dim.dims(inputs[i].fake) for i in self._pinned)
            and (self.mode.mixed is CUDAGraphMode.PIECEWISE or not padding_would_break)
        )

    # Capturing.

    def _capture(self, key: Any, target: Target, args: Sequence[Any], count: int) -> tuple[Any, ...]:
        breaks = self._breaks(target)
        if breaks is None:
            return self._run_compiled(args)
        self._note_moved(target)
        saved = None
        try:
            saved = SavedState(self.program, args)
            static = self._static_inputs(None if target.exact else target.size, args)
            # The address is what counts: a cache that its owner lets go is not kept by the graphs that wrote to it.
            for index, tensor in zip(self._moving, unowned_all([args[i] for i in self._moving]), strict=True):
                static.args[index] = tensor
            rows = RealRows(count)
            padded = None if target.exact else Padded(self.dim, target.size, rows)
            with capture_session(self.recorder), torch.no_grad():
                static.bind(count)(args)
                if not self.recorder.executes:
                    self._warm_up(static.args, padded, saved)
                captured = self.program.capture(
                    static.args, recorder=self.recorder, records=lambda s: not breaks(s), execute=True, padded=padded
                )
        except Exception as error:
            if saved is not None:
                with torch.no_grad():
                    saved.restore()
            self._drop(error, target)
            return self._run_compiled(args)
        variant = Variant(captured, static, rows, target, self._size_report(captured, target), addresses_of(args))
        self._by_target[target] = variant
        return self._bind(key, variant, args, count).hand_out(args)

    def _warm_up(self, args: Sequence[Any], padded: Padded | None, saved: SavedState) -> None:
        """What is set up at a first call (a kernel that is loaded or tuned, a workspace) cannot be while recording."""
        devices = {a.device.index for a in args if isinstance(a, torch.Tensor) and a.device.type == "cuda"}
        with torch.random.fork_rng(list(devices), enabled=self.program.is_random):
            self.program.run(args, padded=padded)
        saved.restore()

    def _static_inputs(self, size: int | None, args: Sequence[Any]) -> StaticInputs:
        """Buffers of a padded size, or (None) of exactly these arguments."""
        with torch.inference_mode(False):  # buffers made in inference mode could not be written outside of it
            return StaticInputs(
                self.program.inputs, self.copied, args, self.rules, dim=self.dim, size=size, memory=self._memory
            )

    def _bind(self, key: Any, variant: Variant, args: Sequence[Any], count: int) -> Bound:
        real = None if variant.target.exact else count
        inputs = self.program.inputs
        written = frozenset(
            args[i].untyped_storage().data_ptr()
            for i in self._pinned
            if inputs[i].storage in self._written and args[i].numel()
        )
        hand_out = self.outputs.bind(variant.captured.outputs, variant.static.args, real)
        bound = self._bound[key] = Bound(variant, count, variant.static.bind(count), hand_out, written)
        return bound

    def _breaks(self, target: Target) -> Callable[[Step], bool] | None:
        """Which breakpoints break the graphs of `target`; None where the mode wants no graph that is broken."""
        records_full = self.mode.decode is CUDAGraphMode.FULL

        def breaks(step: Step) -> bool:
            assert step.breakpoint is not None
            narrowed = step.wants_real_rows and not target.exact
            return not records_full or not step.breakpoint.capturable or narrowed

        steps = self.program.steps
        broken = [s.name for s in steps if (breaks(s) if s.breakpoint else s.forbidden is not None)]
        if broken and self.mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE):
            self._note(
                ReasonCode.MODE_ADAPTED,
                sizes_text(target),
                f"mode {self.mode.name} and {broken[0]} must break",
                "ask for mode FULL_AND_PIECEWISE",
            )
            self._failed.add(target)
            return None
        return breaks

    def _drop(self, error: Exception, target: Target) -> None:
        """Recording failed: this target alone runs compiled from now on."""
        self._failed.add(target)
        self.report.reasons.add(failure_reason(error, sizes_text(target)))

    def _capture_again(self, key: Any, args: Sequence[Any], variant: Variant) -> tuple[Any, ...]:
        moved = [self.program.inputs[i].name for i in self._pinned if variant.addresses[i] != address_of(args[i])]
        self._note(
            ReasonCode.INPUT_MOVED,
            moved[0],
            f"{len(moved)} recorded tensor(s) moved: captured again",
            "update parameters in place instead of replacing them",
        )
        self._forget(variant)
        return self._plan(key, args)

    def _forget(self, variant: Variant) -> None:
        self.report.drop(variant.report)
        self._by_target.pop(variant.target, None)
        self._bound = {k: b for k, b in self._bound.items() if b.variant is not variant}

    def _replaces_another(self, target: Target) -> bool:
        """Make room: the oldest graphs of the same size at other addresses go, since those tensors are likely gone."""
        for other, variant in self._by_target.items():
            if differs_in_addresses_only(other, target):
                self._forget(variant)
                return True
        return False

    def _note_moved(self, target: Target) -> None:
        if any(differs_in_addresses_only(other, target) for other in self._by_target):
            self._note(
                ReasonCode.INPUT_MOVED,
                self.program.inputs[self._moving[0]].name,
                "it is written by the model and is elsewhere now: captured again",
                "keep one tensor and write into it",
            )

    def _size_report(self, captured: CapturedProgram, target: Target) -> SizeReport:
        mode = CUDAGraphMode.PIECEWISE if captured.eager else CUDAGraphMode.FULL
        sizes = target.size or "fixed"
        text = f"{mode.name}, {'exactly ' if target.exact else ''}{sizes} rows"
        report = captured.size_report(text if target.size else f"{mode.name}, fixed sizes", target.size)
        self.report.sizes.append(report)
        logger.info("captured %s: %d graphs in %.0f ms", text, captured.num_graphs, captured.seconds * 1e3)
        return report

    def _note(self, code: ReasonCode, subject: str, detail: str, hint: str = "") -> None:
        self.report.reasons.add(Reason(code, subject, detail, hint))
