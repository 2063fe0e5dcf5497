"""Values that share memory enter a compiled piece as one: their views are made again inside of it.

    before: piece 0: (x) -> a, v = a.view(-1)    breakpoint 1: (a) -> b    piece 2: (a, v, b) -> v.add_(1); b + a
    after:  piece 0: (x) -> a                    breakpoint 1: (a) -> b    piece 2: (a, b) -> v = a.view(-1); ...

AOTAutograd handles inputs that overlap by what it finds of them (`_base`, the size of the storage) when it traces, and
finds something else when the piece is called with another piece's results or with a part of a larger buffer.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from piecewise_backend.source_lines import source_line

_OPERATORS = "add and concat floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_IN_PLACE = frozenset(f"i{name}" for name in _OPERATORS.split())  # operator.iadd, ...
_RESHAPES = frozenset(
    {
        "as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_",
        "unsqueeze_",
    }
)  # fmt: skip


def rebuild_views(graph: fx.Graph, part_of: dict[fx.Node, int], parts: Iterable[int]) -> None:
    """Change `graph` so that no two inputs of any of `parts` are views of one value; `part_of` is kept up to date."""
    nodes_of: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node in part_of:
            nodes_of.setdefault(part_of[node], []).append(node)
    for part in parts:
        nodes = nodes_of[part]
        overlapping = _overlapping(_inputs(nodes, part_of, part))
        if overlapping:
            _Rebuilder(graph, part_of, nodes).rebuild(overlapping)


def check_shapes_kept(graph: fx.Graph, part_of: dict[fx.Node, int]) -> None:
    """ValueError where a value that crosses a boundary changes its shape in place: a trace has its last shape only."""
    for node in graph.nodes:
        if node.op != "call_method" or node.target not in _RESHAPES or node not in part_of:
            continue
        value = node.args[0]
        assert isinstance(value, fx.Node)
        if any(part_of.get(n, part_of[node]) != part_of[node] for n in (value, *value.users)):
            instead = str(node.target).removesuffix("_")
            raise ValueError(
                f"{node.target} changes the shape of {value.name!r}, which is used across a breakpoint, in place: at "
                f"{source_line(node)}. Use {instead}, which returns a view"
            )


def _inputs(nodes: list[fx.Node], part_of: dict[fx.Node, int], part: int) -> list[fx.Node]:
    found = dict.fromkeys(a for node in nodes for a in node.all_input_nodes)
    return [n for n in found if part_of.get(n) != part]


def _overlapping(values: list[fx.Node]) -> list[fx.Node]:
    """Those that share memory with another one."""
    storages = {v: _storages(v.meta.get("example_value")) for v in values}
    counts = Counter(s for found in storages.values() for s in found)
    return [v for v, found in storages.items() if any(counts[s] > 1 for s in found)]


class _Rebuilder:
    """Makes views again at the start of one part."""

    def __init__(self, graph: fx.Graph, part_of: dict[fx.Node, int], nodes: list[fx.Node]) -> None:
        self.graph, self.part_of, self.nodes = graph, part_of, nodes
        self.copies: dict[fx.Node, fx.Node] = {}

    def rebuild(self, values: list[fx.Node]) -> None:
        first = self.nodes[0]
        for value in values:
            with self.graph.inserting_before(first):
                copy = self._copy(value)
            for node in self.nodes:
                node.replace_input_with(value, copy)

    def _copy(self, node: fx.Node) -> fx.Node:
        source = _source(node)
        if source is None:
            return node
        if _writes(node):  # its result is the value that it wrote to
            return self._copy(source)
        if node not in self.copies:
            inner = self._copy(source)
            self.copies[node] = self.graph.node_copy(node, lambda n: inner if n is source else n)
            self.part_of[self.copies[node]] = self.part_of[self.nodes[0]]
        return self.copies[node]


def _source(node: fx.Node) -> fx.Node | None:
    """The value whose memory `node` is a view of, or returns after writing to it; None for memory of its own."""
    if node.op not in ("call_function", "call_method") or isinstance(node.target, torch._ops.HigherOrderOperator):
        return None
    storages = _storages(node.meta.get("example_value"))
    if len(storages) != 1 or "out" in node.kwargs:
        return None
    sources = [n for n in node.all_input_nodes if _storages(n.meta.get("example_value")) & storages]
    if len(sources) != 1:
        return None
    if _writes(node) and node.meta["example_value"] is not sources[0].meta["example_value"]:
        return None
    return sources[0]


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if getattr(operator, name, None) is node.target:
        return name in _IN_PLACE
    return name.endswith("_") and not name.endswith("__")


def _storages(value: Any) -> set[int]:
    return {
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch._subclasses.FakeTensor) and leaf.layout is torch.strided
    }
