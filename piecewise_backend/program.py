"""A compiled model: pieces and breakpoints in order, on values in numbered slots."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecewise_backend.compile import CompiledPiece, PieceCompiler
from piecewise_backend.cudagraph.capture import CapturedProgram, Padded, Step, capture, run_on_real_rows
from piecewise_backend.cudagraph.recorder import GraphRecorder
from piecewise_backend.cudagraph.rows import TokenDim
from piecewise_backend.facts import GraphFacts, SegmentFacts, find_forbidden
from piecewise_backend.observe import tell
from piecewise_backend.split import NodeName, Segment, SplitGraph, free_symbols


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a program, as traced."""

    name: str
    fake: Any
    """A traced tensor, a symbolic int, or the value itself."""
    is_static: bool
    """A parameter or buffer: the same tensor at every call."""
    is_written: bool
    """The program writes to its memory."""
    storage: int
    """Equal where traced inputs share memory; -1 for what is not a tensor."""


@dataclass(frozen=True, slots=True)
class Constant:
    """An output that is not computed."""

    value: Any


@dataclass(frozen=True, slots=True)
class Traced:
    """What one step was traced as."""

    segment: Segment
    facts: SegmentFacts
    compiled: CompiledPiece | None
    """None for a step that runs as traced."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a graph became. Running it needs no state; capturing it makes a `CapturedProgram`."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int | Constant, ...]
    output_fakes: tuple[Any, ...]
    output_storage: tuple[int, ...]
    """Equal where outputs (and `Input.storage`) share memory; -1 for what is not a tensor."""
    num_slots: int
    pieces: tuple[CompiledPiece, ...]
    """The distinct compiled pieces."""
    is_random: bool
    """Whether any node draws random numbers."""
    traced: tuple[Traced, ...] = ()
    """Of each step, in order. Steps that were added to those of the graph come after them and have none."""

    @property
    def num_pieces(self) -> int:
        """Pieces, identical ones counted each time."""
        return sum(step.breakpoint is None for step in self.steps)

    @property
    def breakpoints(self) -> tuple[Step, ...]:
        """The operators between pieces."""
        return tuple(step for step in self.steps if step.breakpoint is not None)

    @property
    def token_dim(self) -> TokenDim:
        """Every shape symbol of the inputs, taken for one dimension."""
        return TokenDim(s for i in self.inputs for s in free_symbols(i.fake))

    def run(
        self,
        args: Sequence[Any],
        *,
        padded: Padded | None = None,
        watch: Callable[[Step, Sequence[Any]], None] | None = None,
    ) -> tuple[Any, ...]:
        """Run the steps one after another, without graphs. With `padded`, `args` are padded to its size.

        `watch` is shown each step and its results.
        """
        slots = self.fill(args)
        for step in self.steps:
            values = [slots[i] for i in step.inputs]
            if padded is not None and step.wants_real_rows:
                results = run_on_real_rows(step, values, padded)
            else:
                results = step.run(*values)
            if watch is not None:
                watch(step, results)
            for slot, value in zip(step.outputs, results, strict=True):
                slots[slot] = value
            for slot in step.frees:
                slots[slot] = None
        return tuple(slots[o] if isinstance(o, int) else o.value for o in self.outputs)

    def warm_up(self, args: Sequence[Any], kernels_of: Callable[[Step], object]) -> None:
        """Run each distinct step once, so that recording finds every kernel loaded; results mean nothing.

        `kernels_of`: equal for operators between pieces that launch the same kernels; None for one that is always run.
        A deep model has the same few steps over and over, and each takes the results of its first like.
        """
        slots, known = self.fill(args), dict[object, Sequence[Any]]()
        for step in self.steps:
            alike = (step.run, None) if step.breakpoint is None else (step.breakpoint.name, kernels_of(step))
            is_known = alike in known and not (step.breakpoint is not None and alike[1] is None)
            results = known[alike] if is_known else step.run(*[slots[i] for i in step.inputs])
            known[alike] = results
            for slot, value in zip(step.outputs, results, strict=True):
                slots[slot] = value

    def capture(
        self,
        args: Sequence[Any],
        *,
        recorder: GraphRecorder,
        records: Callable[[Step], bool],
        execute: bool,
        padded: Padded | None = None,
    ) -> CapturedProgram:
        """Record the steps on `args`, which are read at every replay from where they lie now."""
        captured = capture(
            self.steps,
            self.fill(args),
            self.outputs,
            recorder=recorder,
            records=records,
            execute=execute,
            padded=padded,
        )
        tell(lambda observer: observer.captured(self, args, captured))
        return captured

    def fill(self, args: Sequence[Any]) -> list[Any]:
        """Slots with the inputs in place."""
        return [*args, *[None] * (self.num_slots - len(self.inputs))]


def repeated(program: Program, count: int, after: Callable[..., None]) -> Program:
    """`program` so many times on the same inputs, with `after(i, *outputs)` following run i.

    `after` may write to the inputs: the next run reads them. Outputs are those of the last run.
    """
    fixed, inner = len(program.inputs), program.num_slots - len(program.inputs)
    outputs = tuple(o for o in program.outputs if isinstance(o, int))
    steps: list[Step] = []

    def shifted(slots: Sequence[int], run: int) -> tuple[int, ...]:
        return tuple(s if s < fixed else s + run * inner for s in slots)

    for run in range(count):
        steps.extend(
            dataclasses.replace(
                s, inputs=shifted(s.inputs, run), outputs=shifted(s.outputs, run), frees=shifted(s.frees, run)
            )
            for s in program.steps
        )
        given = shifted(outputs, run)
        call = functools.partial(_without_result, after, run)
        steps.append(_plain_step(f"after run {run}", call, given, (), frees=given if run < count - 1 else ()))
    last = tuple(shifted([o], count - 1)[0] if isinstance(o, int) else o for o in program.outputs)
    return dataclasses.replace(program, steps=tuple(steps), outputs=last, num_slots=fixed + count * inner, traced=())


def followed(program: Program, call: Callable[..., Any], name: str) -> Program:
    """`program` and then `call(*outputs)`, whose result is one more output."""
    outputs = tuple(o for o in program.outputs if isinstance(o, int))
    step = _plain_step(name, lambda *values: (call(*values),), outputs, (program.num_slots,))
    return dataclasses.replace(
        program,
        steps=(*program.steps, step),
        outputs=(*program.outputs, program.num_slots),
        num_slots=program.num_slots + 1,
    )


def _without_result(after: Callable[..., None], run: int, *values: Any) -> tuple[Any, ...]:
    after(run, *values)
    return ()


def _plain_step(
    name: str, run: Callable[..., Any], inputs: tuple[int, ...], outputs: tuple[int, ...], frees: tuple[int, ...] = ()
) -> Step:
    """A step that is no part of the traced graph."""
    return Step(
        name=name,
        run=run,
        inputs=inputs,
        outputs=outputs,
        frees=frees,
        opaque=False,
        launches=True,
        breakpoint=None,
        forbidden=None,
    )


Operands = Mapping[str, tuple[Any, ...]]
"""By attention layer: the traced tensors of its operator, in order."""


def operands_of_layers(graph: SplitGraph) -> Operands:
    """Of the layers whose operator is one call of tensors alone, between pieces."""
    found: dict[str, tuple[Any, ...]] = {}
    for segment in graph.segments:
        if segment.breakpoint is None or (layer := _layer_name(segment)) is None:
            continue
        fakes = [n.meta.get("example_value") for n in segment.module.graph.nodes if n.op == "placeholder"]
        if (places := _operands(segment)) is not None and all(isinstance(fakes[i], torch.Tensor) for i in places):
            found[layer] = tuple(fakes[i] for i in places)
    return found


def build_program(gm: fx.GraphModule, graph: SplitGraph, facts: GraphFacts, compiler: PieceCompiler) -> Program:
    """Compile each distinct piece of `graph` once and lay all values out in slots."""
    by_name = {node.name: node for node in gm.graph.nodes}
    inputs = tuple(_input(by_name[name], facts) for name in graph.placeholders)
    compiled: list[CompiledPiece | None] = [None] * len(graph.segments)
    for index, (segment, found) in enumerate(zip(graph.segments, facts.segments, strict=True)):
        if segment.breakpoint is None and found.launches:
            compiled[index] = compiler.compile(segment.module, compiler.key(segment.structure))
        elif segment.breakpoint is not None and segment.breakpoint.compiled:
            compiled[index] = compiler.compile_if_possible(segment.module, compiler.key(segment.structure))

    slot_of = {name: index for index, name in enumerate(graph.placeholders)}
    steps: list[Step] = []
    for segment, found, piece in zip(graph.segments, facts.segments, compiled, strict=True):
        for name in segment.outputs:
            slot_of[name] = len(slot_of)
        steps.append(_step(segment, slot_of, found, piece, len(steps)))
    outputs = tuple(slot_of[o] if isinstance(o, NodeName) else Constant(o) for o in graph.outputs)
    output_fakes = tuple(
        by_name[o].meta.get("example_value") if isinstance(o, NodeName) and o in by_name else o for o in graph.outputs
    )
    return Program(
        inputs=inputs,
        steps=_with_frees(steps, {o for o in outputs if isinstance(o, int)}, len(inputs)),
        outputs=outputs,
        output_fakes=output_fakes,
        output_storage=tuple(facts.storage.get(o, -1) if isinstance(o, NodeName) else -1 for o in graph.outputs),
        num_slots=len(slot_of),
        is_random=facts.is_random,
        pieces=tuple({p.key: p for p in compiled if p is not None}.values()),
        traced=tuple(Traced(*parts) for parts in zip(graph.segments, facts.segments, compiled, strict=True)),
    )


def _input(node: fx.Node, facts: GraphFacts) -> Input:
    static = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") is not None
    fake = node.meta.get("example_value")
    storage = facts.storage.get(node.name, -1)
    return Input(node.name, fake, static, facts.is_written(node.name), storage)


def _step(
    segment: Segment, slot_of: dict[str, int], facts: SegmentFacts, compiled: CompiledPiece | None, index: int
) -> Step:
    fakes = [n.meta.get("example_value") for n in segment.module.graph.nodes if n.op == "placeholder"]
    (output,) = (n for n in segment.module.graph.nodes if n.op == "output")
    label = f"piece {index}" if segment.breakpoint is None else f"{segment.breakpoint.name} {index}"
    return Step(
        name=label,
        run=segment.module.forward if compiled is None else compiled.run,
        inputs=tuple(slot_of[name] for name in segment.inputs),
        outputs=tuple(slot_of[name] for name in segment.outputs),
        frees=(),
        opaque=compiled is not None and compiled.opaque,
        launches=segment.breakpoint is not None or facts.launches,
        breakpoint=segment.breakpoint,
        forbidden=find_forbidden(segment, facts) if segment.breakpoint is None else None,
        layer=_layer_name(segment) if segment.breakpoint is not None else None,
        operands=_operands(segment) if segment.breakpoint is not None else None,
        input_fakes=tuple(fakes),
        output_fakes=tuple(n.meta.get("example_value") for n in output.args[0]),
    )


def _layer_name(segment: Segment) -> str | None:
    """The layer that an attention operator of ours names in its arguments."""
    for node in segment.module.graph.nodes:
        if node.op == "call_function":
            named = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, str)]
            if named:
                return named[0]
    return None


def _operands(segment: Segment) -> tuple[int, ...] | None:
    """Where the tensors of a segment's one call are among its inputs; None unless it is one call with no result."""
    nodes = list(segment.module.graph.nodes)
    calls = [n for n in nodes if n.op not in ("placeholder", "output")]
    places = {node: i for i, node in enumerate(n for n in nodes if n.op == "placeholder")}
    if len(calls) != 1 or calls[0].kwargs or segment.outputs:
        return None
    given = [a for a in calls[0].args if not isinstance(a, str)]
    if not all(isinstance(a, fx.Node) and a in places for a in given):
        return None
    return tuple(places[a] for a in given)


def _with_frees(steps: list[Step], kept: set[int], num_inputs: int) -> tuple[Step, ...]:
    """Each value is let go after its last use; inputs are the caller's."""
    seen = set(kept) | set(range(num_inputs))
    result = []
    for step in reversed(steps):
        last = tuple(dict.fromkeys(i for i in (*step.inputs, *step.outputs) if i not in seen))
        seen.update(last)
        result.append(dataclasses.replace(step, frees=last))
    return tuple(reversed(result))


def needs_grad(gm: fx.GraphModule) -> list[str]:
    """Names of outputs that would carry a gradient: computed, under grad, from something that requires it."""
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    fakes = ((n.name, n.meta.get("example_value")) for n in output.all_input_nodes)
    return [name for name, fake in fakes if isinstance(fake, torch.Tensor) and fake.requires_grad and not fake.is_leaf]
