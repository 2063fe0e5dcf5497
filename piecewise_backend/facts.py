"""What a graph does to memory, found by running each distinct segment once on fake tensors.

Which inputs are written, which values share memory, which segments launch work, and which hold an operator that no
CUDA graph records: facts that the schema of each ATen operator states, so none has to be guessed from a Python-level
graph. Segments of one structure (the layers of a transformer) have the same facts and are run once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piecewise_backend.cudagraph.checks import launches_work, why_uncapturable, written_arguments
from piecewise_backend.regions import settings_kept
from piecewise_backend.source_lines import source_line
from piecewise_backend.split import Segment, SplitGraph

_DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_HOST_CONTROL_FLOW = frozenset({"cond", "while_loop", "scan", "map_impl"})


@dataclass(frozen=True, slots=True)
class Forbidden:
    """An operator that cannot be recorded, and where the model calls it."""

    op: str
    why: str
    line: str

    def __str__(self) -> str:
        return f"{self.op} at {self.line}: {self.why}"


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """What one structure does, by positions."""

    launches: bool
    """Whether any kernel runs."""
    is_random: bool
    """Whether random numbers are drawn."""
    written: tuple[int, ...]
    """Inputs whose memory is written."""
    memory: tuple[int | None, ...]
    """For each output: the input whose memory it shares; -1, -2, ... for memory of its own, equal where shared;
    None for what is not a tensor."""
    refusal: tuple[int, str, str] | None
    """The first operator that cannot be recorded: the position of its node, its name, why."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Facts about the values of one graph, by name; `storage` numbers are equal where memory is shared."""

    storage: dict[str, int]
    written: frozenset[int]
    segments: tuple[SegmentFacts, ...]

    @property
    def is_random(self) -> bool:
        """Whether any segment draws random numbers."""
        return any(s.is_random for s in self.segments)

    def is_written(self, name: str) -> bool:
        """Whether the memory of value `name` is written by the graph."""
        return self.storage.get(name, -1) in self.written


def find_facts(gm: fx.GraphModule, graph: SplitGraph) -> GraphFacts:
    """Facts about `gm`, split into `graph`. Neither is changed."""
    known: dict[str, SegmentFacts] = {}
    for segment in graph.segments:
        if segment.structure not in known:
            known[segment.structure] = _inspect(segment.module)
    found = tuple(known[segment.structure] for segment in graph.segments)
    storage = _storage_of_inputs(gm)
    numbers = itertools.count(len(storage))
    written: set[int] = set()
    for segment, facts in zip(graph.segments, found, strict=True):
        written.update(storage[segment.inputs[i]] for i in facts.written)
        own: dict[int, int] = {}
        for name, memory in zip(segment.outputs, facts.memory, strict=True):
            if memory is not None and memory < 0:
                storage[name] = own[memory] = own.get(memory, next(numbers))
            elif memory is not None:
                storage[name] = storage[segment.inputs[memory]]
    return GraphFacts(storage, frozenset(written), found)


def find_forbidden(segment: Segment, facts: SegmentFacts) -> Forbidden | None:
    """The first operator of `segment` that cannot be recorded."""
    if facts.refusal is None:
        return None
    position, op, why = facts.refusal
    node = next(itertools.islice(segment.module.graph.nodes, position, None))
    return Forbidden(op, why, source_line(node))


def _storage_of_inputs(gm: fx.GraphModule) -> dict[str, int]:
    found: dict[str, int] = {}
    numbers: dict[int, int] = {}
    for node in gm.graph.nodes:
        fake = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(fake, torch.Tensor) and fake.layout is torch.strided:
            found[node.name] = numbers.setdefault(fake.untyped_storage()._cdata, len(numbers))
    return found


def _inspect(module: fx.GraphModule) -> SegmentFacts:
    inspector = _Inspector(module)
    inputs = inspector.fake_inputs()
    observer = inspector.observer
    # The Python dispatcher, as when Dynamo traced: some operators' C++ would turn a symbolic size into a number.
    with torch.no_grad(), settings_kept(), enable_python_dispatcher(), inspector.fake_context():
        outputs = inspector.run(*inputs)
    given: dict[int, int] = {}
    for position, value in enumerate(inputs):
        if _has_memory(value):
            given.setdefault(observer.number(value), position)
    own: dict[int, int] = {}
    memory: list[int | None] = []
    for value in outputs:
        number = observer.number(value) if _has_memory(value) else None
        if number is None or number in given:
            memory.append(None if number is None else given[number])
        else:
            memory.append(own.setdefault(number, -1 - len(own)))
    return SegmentFacts(
        launches=inspector.launches,
        is_random=inspector.is_random,
        written=tuple(i for i, v in enumerate(inputs) if _has_memory(v) and observer.number(v) in observer.written),
        memory=tuple(memory),
        refusal=inspector.refusal,
    )


def _has_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


class _Observer(TorchDispatchMode):
    """Sees every ATen call of the node being run."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[int, int] = {}
        self.keep: list[torch.UntypedStorage] = []  # a freed storage's address could come again
        self.written: set[int] = set()
        self.launched = False
        self.refusal: tuple[str, str] | None = None
        self.random = False

    def number(self, tensor: torch.Tensor) -> int:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside vmap: the batch is what has memory
            tensor = torch._C._functorch.get_unwrapped(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in self.numbers:
            self.numbers[storage._cdata] = len(self.numbers)
            self.keep.append(storage)
        return self.numbers[storage._cdata]

    def mark_written(self, tensors: Iterable[torch.Tensor]) -> None:
        self.written.update(self.number(t) for t in tensors if t.layout is torch.strided)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.launched |= launches_work(func)
        self.random |= _draws_random_numbers(func, args, kwargs)
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs)))
        why = why_uncapturable(func, args, kwargs) if has_tensors else None  # a call on numbers only moves no data
        if why is not None and self.refusal is None:
            self.refusal = (str(func), why)
        self.mark_written(written_arguments(func, args, kwargs))
        return func(*args, **kwargs)


def _draws_random_numbers(func: Any, args: Any, kwargs: Any) -> bool:
    """An operator tagged as random is not, when its dropout probability is 0 (attention is tagged for its dropout)."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return value != 0
    return True


class _Inspector(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.nodes = list(gm.graph.nodes)
        self.observer = _Observer()
        self.launches = False
        self.is_random = False
        self.refusal: tuple[int, str, str] | None = None
        examples = [n.meta.get("example_value") for n in self.nodes]
        fakes = (e for e in tree_leaves(examples) if isinstance(e, torch._subclasses.FakeTensor))
        self.fake_mode = next((fake.fake_mode for fake in fakes), None)

    def fake_context(self) -> Any:
        if self.fake_mode is None or self.fake_mode.shape_env is None:
            return contextlib.nullcontext()
        return self.fake_mode.shape_env.ignore_fresh_unbacked_symbols()

    def fake_inputs(self) -> list[Any]:
        """The placeholders' fakes, detached, so that in-place changes of shape stay in this run."""
        values = [n.meta.get("example_value") for n in self.nodes if n.op == "placeholder"]
        return [v.detach() if isinstance(v, torch.Tensor) else v for v in values]

    def run_node(self, n: fx.Node) -> Any:
        observer = self.observer
        observer.launched, observer.refusal, observer.random = False, None, False
        result = self._run_higher_order(n) if _is_higher_order(n) else self._run_watched(n)
        self.launches |= observer.launched
        self.is_random |= observer.random
        if observer.refusal is not None and self.refusal is None:
            self.refusal = (self.nodes.index(n), *observer.refusal)
        return result

    def _run_watched(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        try:
            with self.fake_mode or contextlib.nullcontext(), self.observer:
                return super().run_node(n)
        except _DATA_DEPENDENT as error:
            name = getattr(n.target, "__name__", str(n.target))
            self.observer.refusal = self.observer.refusal or (name, str(error).splitlines()[0])
            self.observer.launched = True
            return n.meta.get("example_value")

    def _run_higher_order(self, n: fx.Node) -> Any:
        """A higher-order operator is not run: its traced result stands in, and it may write to what it is given."""
        name = n.target.name()  # type: ignore[union-attr]
        self.observer.launched = True
        if name in _HOST_CONTROL_FLOW:
            self.observer.refusal = (name, "the host decides which branch runs, so it must wait for the device")
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if "mutation" in name:
            self.observer.mark_written(t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        return n.meta.get("example_value")


def _is_higher_order(n: fx.Node) -> bool:
    return n.op == "call_function" and isinstance(n.target, torch._ops.HigherOrderOperator)
