"""The one walk: a program's steps, in order, into graphs and the eager calls between them."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from attention.ops import bind
from piecewise_backend.breakpoints import Breakpoint
from piecewise_backend.collector import collector_paused
from piecewise_backend.cudagraph.fingerprint import Fingerprint
from piecewise_backend.cudagraph.recorder import GraphRecorder
from piecewise_backend.cudagraph.rows import RealRows, TokenDim, copy_into
from piecewise_backend.facts import Forbidden
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.reporting.records import SizeReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One segment, ready to run on values in numbered slots."""

    name: str
    run: Callable[..., Any]
    """Takes the values in `inputs`, returns a tuple for `outputs`."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...]
    """Slots that no later step reads."""
    opaque: bool
    launches: bool
    breakpoint: Breakpoint | None
    forbidden: Forbidden | None
    """An operator in a piece that no graph can record: the piece runs between graphs."""
    layer: str | None = None
    """The attention layer whose operator this is."""
    operands: tuple[int, ...] | None = None
    """Of a breakpoint that is one call: which of `inputs` its tensors are, in order; None for anything else."""
    input_fakes: tuple[Any, ...] = ()
    """Traced values of `inputs`, with symbolic sizes."""
    output_fakes: tuple[Any, ...] = ()

    @property
    def wants_real_rows(self) -> bool:
        """Whether this runs between graphs on the real rows only: an operator without metadata of its own."""
        return self.breakpoint is not None and not self.breakpoint.owns_metadata

    def is_recorded(self, recorded_layers: Set[str]) -> bool:
        """Of a breakpoint: ours are recorded by their layers, anything else never, since its rows are padded."""
        assert self.breakpoint is not None
        return self.breakpoint.owns_metadata and self.breakpoint.capturable and self.layer in recorded_layers


@dataclass(frozen=True, slots=True)
class Padded:
    """The padding of one walk: the dynamic dimension, its padded size, and how much of it is real."""

    dim: TokenDim
    size: int
    rows: RealRows
    rubbish: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    """Fills padded rows, given the whole tensor too, at each operator that is given real rows only. What they hold
    there is left from other sizes, so a proof that padding is harmless has to try what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedProgram:
    """A program recorded for one descriptor: calls without arguments, and where its results lie."""

    calls: tuple[Callable[[], Any], ...]
    outputs: tuple[Any, ...]
    num_graphs: int
    recorded: tuple[str, ...]
    """Names of the breakpoints that are inside a graph."""
    eager: tuple[str, ...]
    """Names of the steps that run between graphs."""
    seconds: float
    memory_bytes: int
    keep: tuple[Any, ...]
    """Memory outside of the pool that graphs read: alive as long as they are."""
    fingerprints: tuple[Fingerprint, ...] = ()
    """What recorded operators read of their metadata, group by group."""

    def size_report(self, descriptor: str, num_tokens: int, kind: str) -> SizeReport:
        """What the report says of this capture; `kind`: of the batches it serves, as the report names it."""
        return SizeReport(
            descriptor=descriptor,
            num_tokens=num_tokens,
            num_graphs=self.num_graphs,
            seconds=self.seconds,
            memory_bytes=self.memory_bytes,
            eager_ops=self.eager,
            kind=kind,
        )

    def replay(self) -> tuple[Any, ...]:
        """Run everything on the memory it was recorded on; returns the static outputs, valid until the next replay."""
        for call in self.calls:
            call()
        return self.outputs


def capture(
    steps: Sequence[Step],
    slots: list[Any],
    output_slots: Sequence[Any],
    *,
    recorder: GraphRecorder,
    records: Callable[[Step], bool],
    execute: bool,
    padded: Padded | None = None,
) -> CapturedProgram:
    """Walk `steps` once over `slots` (static inputs filled in) and record them.

    `records(step)`: whether a breakpoint is recorded into the current graph; else it breaks it and runs eagerly, as
    does a piece with a forbidden operator. `execute`: the walk also does the work once, as a plain run would, so that
    eager steps see real values and nothing runs twice. With `padded`, operators without metadata are given real rows.
    """
    started, memory = time.perf_counter(), recorder.memory_bytes()
    walk = _Walk(recorder, execute, padded)
    walk.keep.extend(slots)
    try:
        for step in steps:
            args = [slots[i] for i in step.inputs]
            recorded = step.forbidden is None and (step.breakpoint is None or records(step))
            results = walk.record(step, args) if recorded else walk.run_eagerly(step, args)
            for slot, value in zip(step.outputs, results, strict=True):
                slots[slot] = value
            del args, results
            for slot in step.frees:
                slots[slot] = None
        walk.close()
    except BaseException:
        recorder.abort()
        raise
    outputs = tuple(walk.weakened(slots[o]) if isinstance(o, int) else o.value for o in output_slots)
    return CapturedProgram(
        calls=tuple(walk.calls),
        outputs=outputs,
        num_graphs=walk.num_graphs,
        recorded=tuple(walk.recorded),
        eager=tuple(walk.eager),
        seconds=time.perf_counter() - started,
        memory_bytes=recorder.memory_bytes() - memory,
        keep=tuple(v for v in walk.keep if isinstance(v, torch.Tensor)),
    )


class _Walk:
    """The state of one capture."""

    def __init__(self, recorder: GraphRecorder, execute: bool, padded: Padded | None) -> None:
        self.recorder = recorder
        self.execute = execute
        self.padded = padded
        self.calls: list[Callable[[], Any]] = []
        self.recorded: list[str] = []
        self.eager: list[str] = []
        self.num_graphs = 0
        self.open = False
        self.pooled: set[int] = set()
        self.keep: list[Any] = []

    def record(self, step: Step, args: list[Any]) -> tuple[Any, ...]:
        if not step.launches and not self.open:
            results = step.run(*args)  # views and allocations: static results, nothing to repeat
            self.keep.extend(r for r in results if _address(r) not in self.pooled)
            return results
        if not self.open:
            self.recorder.begin()
            self.open = True
        results = self.recorder.call(step.run, args, opaque=step.opaque)
        self.pooled |= {_address(r) for r in results} - {_address(a) for a in args} - {0}
        if step.breakpoint is not None:
            self.recorded.append(step.name)
        return results

    def close(self) -> None:
        """End the open graph, if any, and do its work now where recording did not."""
        if not self.open:
            return
        self.open = False
        graph = self.recorder.end()
        self.calls.append(graph.replay)
        self.num_graphs += 1
        if self.execute and not self.recorder.executes:
            graph.replay()

    def run_eagerly(self, step: Step, args: list[Any]) -> tuple[Any, ...]:
        self.close()
        self.eager.append(step.name)
        kept = [self.weakened(a) for a in args]
        if self.padded is not None and step.wants_real_rows:
            results = run_on_real_rows(step, args, self.padded)
            call = _narrowed_call(step, kept, results, self.padded)
        else:
            direct = _direct_call(step, kept)
            if direct is not None and not self.execute:  # it has no result, and warming up has run its like
                self.calls.append(direct)
                return ()
            results = step.run(*args)
            call = direct or _bound_call(step.run, kept, results)
        self.calls.append(call)
        return results

    def weakened(self, value: Any) -> Any:
        """Values in recorded memory are kept by address only, so that graphs recorded later may reuse it."""
        return self.recorder.weaken(value) if _address(value) in self.pooled else value


def _address(value: Any) -> int:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.untyped_storage().data_ptr()
    return 0


def _direct_call(step: Step, args: list[Any]) -> Callable[[], Any] | None:
    """An attention operator of ours on its static arguments, without the graph module and dispatcher around it."""
    if step.breakpoint is None or step.layer is None or step.operands is None:
        return None
    return bind(step.breakpoint.name, [args[i] for i in step.operands], step.layer)


def _bound_call(run: Callable[..., Any], args: list[Any], results: tuple[Any, ...]) -> Callable[[], Any]:
    """`run` on its static arguments; fresh results are copied to where they lay at capture."""
    given = {_address(a) for a in tree_leaves(args)}
    fresh = [(i, r) for i, r in enumerate(results) if isinstance(r, torch.Tensor) and _address(r) not in given]
    if not fresh:
        return lambda: run(*args)

    def call() -> None:
        new = run(*args)
        for index, static in fresh:
            copy_into(static, new[index])

    return call


def run_on_real_rows(step: Step, args: Sequence[Any], padded: Padded) -> tuple[Any, ...]:
    """Run an operator on views of the real rows of `args`; its results are padded again, with zeros."""
    dim, count = padded.dim, padded.rows.count
    _fill_padded_rows(args, step.input_fakes, padded)
    new = step.run(*[dim.narrow(a, fake, count) for a, fake in zip(args, step.input_fakes, strict=True)])
    given = {_address(a) for a in args}
    results = list(new)
    for i, (value, fake) in enumerate(zip(new, step.output_fakes, strict=True)):
        if isinstance(value, torch.Tensor) and _address(value) not in given and dim.dims(fake):
            results[i] = dim.empty(fake, padded.size)
            copy_into(dim.narrow(results[i], fake, count), value)
    _fill_padded_rows(results, step.output_fakes, padded)
    return tuple(results)


def _fill_padded_rows(values: Sequence[Any], fakes: Sequence[Any], padded: Padded) -> None:
    if padded.rubbish is not None:
        for value, fake in zip(values, fakes, strict=True):
            for _, rows in padded.dim.padded_regions(value, fake, padded.rows.count):
                padded.rubbish(rows, value)


def _narrowed_call(step: Step, kept: list[Any], results: tuple[Any, ...], padded: Padded) -> Callable[[], Any]:
    """The same at replay: views of static memory, cut anew when the number of real rows changes."""
    dim, rows = padded.dim, padded.rows
    given = {_address(a) for a in kept}
    fresh = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and _address(r) not in given]
    bound: dict[int, tuple[list[Any], list[tuple[int, Any]]]] = {}

    def bind(count: int) -> tuple[list[Any], list[tuple[int, Any]]]:
        inputs = [dim.narrow(a, fake, count) for a, fake in zip(kept, step.input_fakes, strict=True)]
        return inputs, [(i, dim.narrow(results[i], step.output_fakes[i], count)) for i in fresh]

    def call() -> None:
        count = rows.count
        if count not in bound:
            bound[count] = bind(count)
        inputs, outputs = bound[count]
        new = step.run(*inputs)
        for index, static in outputs:
            copy_into(static, new[index])

    return call


@contextlib.contextmanager
def capture_session(recorder: GraphRecorder) -> Iterator[None]:
    """Surrounds all captures of a program: the garbage collector rests, and what exists now is frozen.

    A collection in the middle of a recording could free device memory, which a CUDA capture does not allow: neither
    may one start by itself, nor may one that an operator asks for find anything. What is garbage already is not looked
    for, which would take a third of a second in a process with a model; it is freed by a later collection. Only where
    the user froze objects, which are to stay frozen, is it: it would stay with them.
    """
    frozen_before = gc.get_freeze_count()
    if frozen_before:
        gc.collect()
    gc.freeze()
    try:
        with collector_paused(), recorder.session():
            yield
    finally:
        if not frozen_before:
            gc.unfreeze()


def failure_reason(error: Exception, subject: str) -> Reason:
    """Why a recording of `subject` failed, as the report has it."""
    return Reason(
        ReasonCode.OUT_OF_MEMORY if is_out_of_memory(error) else ReasonCode.CAPTURE_FAILED,
        subject,
        f"{type(error).__name__}: {error}",
        "it runs without its graph; the other sizes are not affected",
    )


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on the device or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError)
