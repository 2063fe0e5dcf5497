"""What a plain caller captures: which call is padded to which size, when it is recorded, and why another runs compiled.

Sizes are captured as they repeat; one that would be padded is padded only once that is proved harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from piecewise_backend.config import Options
from piecewise_backend.cudagraph.capture import Step, failure_reason, is_out_of_memory
from piecewise_backend.cudagraph.modes import CUDAGraphMode
from piecewise_backend.cudagraph.sizes import smallest_fitting
from piecewise_backend.padding import says_nothing, why_padding_matters
from piecewise_backend.program import Program
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.reporting.report import Report
from piecewise_backend.static_inputs import StaticInputs, plain_name, unused_padding
from piecewise_backend.variants import Target, sizes_text

_MANY_SIGHTINGS = 4096


class CapturePlan:
    """Decides for each size of `program`; every decision against a graph is a reason in `report`.

    `rules`: how each input is padded. `pinned`: inputs recorded at their own addresses. `copied`: the other tensors.
    """

    def __init__(
        self,
        program: Program,
        options: Options,
        report: Report,
        sizes: tuple[int, ...],
        rules: Sequence[str],
        *,
        pinned: Sequence[int],
        copied: Sequence[int],
    ) -> None:
        self.program, self.options, self.report, self.rules = program, options, report, rules
        self.dim = program.token_dim
        self.mode = CUDAGraphMode.parse(options.mode)
        self._pinned, self._copied = pinned, copied
        self._note_unused_padding()
        # Operators that are given real rows break padded graphs, but may be recorded where every row is real.
        self._records_more_exactly = self.mode.decode is CUDAGraphMode.FULL and any(
            step.wants_real_rows and step.breakpoint is not None and step.breakpoint.capturable
            for step in program.breakpoints
        )
        self._can_capture = self._sizes_are_known()
        self.sizes = sizes if self._can_pad() else ()
        """Those that a call may be padded to; none: each is captured exactly."""
        self._failed: set[Target] = set()
        self._sightings: dict[Target, int] = {}
        self._proved: set[int] = set()

    def target(self, count: int, sizes: tuple[int, ...], addresses: tuple[int, ...]) -> Target | None:
        """What to capture for a call of `count` rows; None: run it compiled, for a reason now in the report.

        `sizes`: all of the call's symbolic sizes. `addresses`: of the inputs that keep their own.
        """
        if not self._can_capture:
            return None
        if not self.sizes:
            return Target(count, True, sizes, addresses)
        size = smallest_fitting(self.sizes, count)
        if size is None:
            self.note(
                ReasonCode.ABOVE_ALL_SIZES,
                f"more than {self.sizes[-1]} rows",
                "above the largest capture size",
                "add it to options={'capture_sizes': [...]}",
            )
            return None
        if (size - count) / size > self.options.max_padding_waste:
            self.note(
                ReasonCode.TOO_MUCH_PADDING,
                f"padding to {size} rows",
                f"would waste more than {self.options.max_padding_waste:.0%}",
                "add a size to options={'capture_sizes': [...]}, or raise max_padding_waste",
            )
            return None
        exact = size == count and self._records_more_exactly
        return Target(size, exact, sizes if exact else (), addresses)

    def is_due(self, target: Target, make_room: Callable[[Target], bool]) -> bool:
        """Whether `target`, seen once more, is to be captured now; `make_room` may drop a capture for it."""
        if target in self._failed:
            return False
        if len(self._sightings) > _MANY_SIGHTINGS:  # addresses that never come again
            self._sightings.clear()
            self._failed.clear()
        seen = self._sightings[target] = self._sightings.get(target, 0) + 1
        if seen < self.options.capture_after:
            after = self.options.capture_after
            self.note(ReasonCode.NOT_SEEN_TWICE, "new sizes", f"ran compiled: a size is captured at its call {after}")
            return False
        if self.report.num_captures >= self.options.max_captures and not make_room(target):
            self.note(
                ReasonCode.TOO_MANY_CAPTURES,
                "captures",
                f"there are {self.report.num_captures} variants already",
                "raise options={'max_captures': ...}, or give fewer capture_sizes",
            )
            return False
        return True

    def needs_proof(self, target: Target, count: int) -> bool:
        """Whether `count` rows are padded to a size that is not proved harmless yet."""
        return target.size != count and target.size not in self._proved

    def prove(
        self,
        target: Target,
        sizes: tuple[int, ...],
        args: Sequence[Any],
        count: int,
        static_inputs: Callable[[int, Sequence[Any]], StaticInputs],
    ) -> Target | None:
        """Try whether padding is harmless. Returns what to capture now, given the answer; None: nothing.

        Where it is not, `sizes` is empty from now on. `static_inputs(size, args)` makes buffers of a padded size.
        """
        exact = Target(count, True, sizes, target.addresses)
        name = says_nothing(self.program, args, self.rules)
        if name is not None:
            self.note(
                ReasonCode.CROSS_ROW,
                name,
                "all of it is 0, which proves nothing: this call's size is taken exactly",
                f"call the model with other values, or declare options={{'padding': {{{name!r}: 'zero'}}}}",
            )
            return exact
        try:
            with torch.no_grad():
                static = static_inputs(target.size, args)
                why = why_padding_matters(
                    self.program, args, static, self.rules, count, target.size, thorough=not self._proved
                )
        except Exception as error:
            if is_out_of_memory(error):
                self.drop(error, target)
                return None
            why = f"the model does not run on padded rows ({type(error).__name__}: {error})"
        if why is None:
            self._proved.add(target.size)
            return target
        self.sizes = ()
        self.note(ReasonCode.CROSS_ROW, "padding", f"{why}: sizes are captured exactly from now on")
        return exact

    def breaks(self, target: Target) -> Callable[[Step], bool] | None:
        """Which breakpoints break the graphs of `target`; None where the mode wants no graph that is broken."""
        records_full = self.mode.decode is CUDAGraphMode.FULL

        def breaks(step: Step) -> bool:
            assert step.breakpoint is not None
            narrowed = step.wants_real_rows and not target.exact
            return not records_full or not step.breakpoint.capturable or narrowed

        steps = self.program.steps
        broken = [s.name for s in steps if (breaks(s) if s.breakpoint else s.forbidden is not None)]
        if broken and self.mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE):
            self.note(
                ReasonCode.MODE_ADAPTED,
                sizes_text(target),
                f"mode {self.mode.name} and {broken[0]} must break",
                "ask for mode FULL_AND_PIECEWISE",
            )
            self._failed.add(target)
            return None
        return breaks

    def drop(self, error: Exception, target: Target) -> None:
        """Recording failed: this target alone runs compiled from now on."""
        self._failed.add(target)
        self.report.reasons.add(failure_reason(error, sizes_text(target)))

    def note(self, code: ReasonCode, subject: str, detail: str, hint: str = "") -> None:
        """Put a reason into the report."""
        self.report.reasons.add(Reason(code, subject, detail, hint))

    def _note_unused_padding(self) -> None:
        inputs = self.program.inputs
        for name in unused_padding(self.options.padding, (given.name for given in inputs)):
            tensors = [given for given in inputs if isinstance(given.fake, torch.Tensor) and not given.is_static]
            known = ", ".join(repr(plain_name(given.name)) for given in tensors)
            hint = f"this graph's inputs are {known}"
            self.note(ReasonCode.PADDING_UNUSED, f"padding of {name!r}", "there is no such input", hint)

    def _sizes_are_known(self) -> bool:
        """Graphs have fixed sizes, so none can be made where the data decides a size or a number between steps."""
        for step in self.program.steps:
            if any(not self.dim.decides(fake) for fake in step.output_fakes):
                self.note(
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
            self.note(
                ReasonCode.SEVERAL_DYNAMIC_DIMS,
                "sizes",
                f"{len(symbols)} independent dynamic dimensions: sizes are captured exactly",
                "keep all but one dimension fixed (torch._dynamo.mark_static)",
            )
        elif self.program.is_random and symbols:
            self.note(ReasonCode.CROSS_ROW, "padding", "the model draws random numbers: sizes are captured exactly")
        padding_would_break = any(step.wants_real_rows for step in self.program.breakpoints)
        return (
            len(symbols) == 1
            and not self.program.is_random
            and any(self.dim.dims(inputs[i].fake) for i in self._copied)  # else the int is a number, not a size
            and not any(self.dim.dims(inputs[i].fake) for i in self._pinned)
            and (self.mode.mixed is CUDAGraphMode.PIECEWISE or not padding_would_break)
        )
