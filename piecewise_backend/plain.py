"""Plain callers: a compiled graph called with whatever tensors come, captured as sizes repeat.

One call: find the variant for its (sizes, addresses), copy the inputs in, replay, hand out results of the caller's
own. A call without a variant is planned: it runs compiled, with a reason, or captures its size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from piecewise_backend.capture_plan import CapturePlan
from piecewise_backend.config import Options
from piecewise_backend.cudagraph.capture import CapturedProgram, Padded, capture_session
from piecewise_backend.cudagraph.modes import CUDAGraphMode
from piecewise_backend.cudagraph.recorder import GraphRecorder, unowned_all
from piecewise_backend.cudagraph.rows import RealRows
from piecewise_backend.outputs import OutputPlan
from piecewise_backend.padding import SavedState
from piecewise_backend.program import Program
from piecewise_backend.reasons import ReasonCode
from piecewise_backend.reporting.records import SizeReport
from piecewise_backend.reporting.report import Report
from piecewise_backend.static_inputs import StaticInputs, StaticMemory, padding_rule
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
    written_storages,
)

logger = logging.getLogger(__name__)


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
        self._traced_graph = gm
        inputs = program.inputs
        self._ints = [i for i, given in enumerate(inputs) if isinstance(given.fake, torch.SymInt)]
        self._pinned = own_address_inputs(program)
        self._moving = [i for i in self._pinned if not inputs[i].is_static]
        tensors = [i for i, given in enumerate(inputs) if isinstance(given.fake, torch.Tensor)]
        self.copied = [i for i in tensors if i not in self._pinned]
        self.rules = [padding_rule(options.padding, g.name, g.fake) for g in inputs]
        self._written = written_storages(program)
        self.plan = CapturePlan(program, options, report, sizes, self.rules, pinned=self._pinned, copied=self.copied)
        self._memory = StaticMemory(self.plan.sizes[-1] if self.plan.sizes else 0)
        self.outputs = OutputPlan(program, gm, self._pinned)
        self._bound: dict[Any, Bound] = {}
        self._by_target: dict[Target, Variant] = {}

    @property
    def variants(self) -> list[Variant]:
        """What is captured, oldest first."""
        return list(self._by_target.values())

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
        self.plan.note(
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
        sizes, addresses = key[: len(self._ints)], key[len(self._ints) :]
        target = self.plan.target(count, sizes, addresses)
        if target is None or not self._is_wanted(target):
            return self._run_compiled(args)
        if self.plan.needs_proof(target, count):
            target = self._prove(target, sizes, args, count)
            if target is None or not self._is_wanted(target):
                return self._run_compiled(args)
        if target not in self._by_target:
            return self._capture(key, target, args, count)
        self._bind(key, self._by_target[target], args, count)
        return self(*args)

    def _is_wanted(self, target: Target) -> bool:
        """Whether a graph is there for `target`, or is to be captured now."""
        return target in self._by_target or self.plan.is_due(target, self._replaces_another)

    def _prove(self, target: Target, sizes: tuple[int, ...], args: Sequence[Any], count: int) -> Target | None:
        found = self.plan.prove(target, sizes, args, count, self._static_inputs)
        if not self.plan.sizes:  # it mattered, so that what was proved for other sizes was by chance
            self._bound = {k: b for k, b in self._bound.items() if b.count == b.variant.target.size}
        return found

    # Capturing.

    def _capture(self, key: Any, target: Target, args: Sequence[Any], count: int) -> tuple[Any, ...]:
        breaks = self.plan.breaks(target)
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
            self.plan.drop(error, target)
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

    def _capture_again(self, key: Any, args: Sequence[Any], variant: Variant) -> tuple[Any, ...]:
        moved = [self.program.inputs[i].name for i in self._pinned if variant.addresses[i] != address_of(args[i])]
        self.plan.note(
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
            self.plan.note(
                ReasonCode.INPUT_MOVED,
                self.program.inputs[self._moving[0]].name,
                "it is written by the model and is elsewhere now: captured again",
                "keep one tensor and write into it",
            )

    def _size_report(self, captured: CapturedProgram, target: Target) -> SizeReport:
        mode = CUDAGraphMode.PIECEWISE if captured.eager else CUDAGraphMode.FULL
        sizes = target.size or "fixed"
        text = f"{mode.name}, {'exactly ' if target.exact else ''}{sizes} rows"
        text_or_fixed = text if target.size else f"{mode.name}, fixed sizes"
        report = captured.size_report(text_or_fixed, target.size, "exact" if target.exact else "padded")
        self.report.sizes.append(report)
        logger.info("captured %s: %d graphs in %.0f ms", text, captured.num_graphs, captured.seconds * 1e3)
        return report
