"""What a graph does to memory, found by running it once on fake tensors.

Which inputs are written, which values share memory, which nodes launch work, and which hold an operator that no CUDA
graph records: facts that the schema of each ATen operator states, so none has to be guessed from a Python-level graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piecewise_backend.cudagraph.checks import launches_work, why_uncapturable, written_arguments

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
class GraphFacts:
    """Facts by node name; `storage` numbers are equal where memory is shared."""

    storage: dict[str, int]
    written: frozenset[int]
    launching: frozenset[str]
    forbidden: dict[str, Forbidden]
    random: frozenset[str]

    def is_written(self, name: str) -> bool:
        """Whether the memory of value `name` is written by the graph."""
        return self.storage.get(name, -1) in self.written

    def launches(self, nodes: Iterable[str]) -> bool:
        """Whether any of `nodes` runs a kernel."""
        return not self.launching.isdisjoint(nodes)

    def first_forbidden(self, nodes: Iterable[str]) -> Forbidden | None:
        """The first of `nodes` that cannot be recorded."""
        return next((self.forbidden[n] for n in nodes if n in self.forbidden), None)


def find_facts(gm: fx.GraphModule) -> GraphFacts:
    """Run `gm` once on the fake tensors in its nodes' `example_value`. `gm` is not changed."""
    inspector = _Inspector(gm)
    with torch.no_grad(), inspector.fake_context():
        inspector.run(*inspector.fake_inputs())
    return GraphFacts(
        storage=inspector.storage,
        written=frozenset(inspector.observer.written),
        launching=frozenset(inspector.launching),
        forbidden=inspector.forbidden,
        random=frozenset(inspector.random),
    )


def source_line(node: fx.Node) -> str:
    """"file:line, in function: code" of the user's line that made `node`."""
    frames = [line.strip() for line in node.meta.get("stack_trace", "").splitlines()]
    for index in range(len(frames) - 1, -1, -1):
        if frames[index].startswith("File "):
            code = frames[index + 1] if index + 1 < len(frames) else ""
            place = frames[index].removeprefix("File ").replace('"', "").replace(", line ", ":")
            return f"{place}: {code}"
    return f"node {node.name}"


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
        why = why_uncapturable(func, args, kwargs)
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
        self.observer = _Observer()
        self.storage: dict[str, int] = {}
        self.launching: set[str] = set()
        self.forbidden: dict[str, Forbidden] = {}
        self.random: set[str] = set()
        examples = [n.meta.get("example_value") for n in gm.graph.nodes]
        fakes = (e for e in tree_leaves(examples) if isinstance(e, torch._subclasses.FakeTensor))
        self.fake_mode = next((fake.fake_mode for fake in fakes), None)

    def fake_context(self) -> Any:
        if self.fake_mode is None or self.fake_mode.shape_env is None:
            return contextlib.nullcontext()
        return self.fake_mode.shape_env.ignore_fresh_unbacked_symbols()

    def fake_inputs(self) -> list[Any]:
        """The placeholders' fakes, detached, so that in-place changes of shape stay in this run."""
        values = [n.meta.get("example_value") for n in self.module.graph.nodes if n.op == "placeholder"]
        return [v.detach() if isinstance(v, torch.Tensor) else v for v in values]

    def run_node(self, n: fx.Node) -> Any:
        observer = self.observer
        observer.launched, observer.refusal, observer.random = False, None, False
        result = self._run_higher_order(n) if _is_higher_order(n) else self._run_watched(n)
        if observer.launched:
            self.launching.add(n.name)
        if observer.random:
            self.random.add(n.name)
        if observer.refusal is not None:
            self.forbidden[n.name] = Forbidden(*observer.refusal, source_line(n))
        if isinstance(result, torch.Tensor) and result.layout is torch.strided:
            self.storage[n.name] = observer.number(result)
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
