"""FX graph to pieces and breakpoints.

Before (one graph, as Dynamo made it):

    h = linear(x, w0);  q = h.view(...);  attention(q, cache, out);  s = h.shape;  y = out.view(s);  z = linear(y, w1)

After (three segments; only tensors and ints cross):

    piece 0:      (x, w0) -> h, q, out
    breakpoint 1: (q, cache, out) -> ()
    piece 2:      (out, w1, s0) -> z
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from piecewise_backend.breakpoints import Breakpoint, match


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of nodes that executes as one unit."""

    module: fx.GraphModule
    """Takes the values named `inputs`, returns a tuple of the values named `outputs`."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    breakpoint: Breakpoint | None
    """The operator that breaks here; None for a piece."""
    nodes: tuple[str, ...]
    """Names of the original nodes in this segment."""


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """Segments in execution order, and the names that enter and leave the whole."""

    segments: tuple[Segment, ...]
    placeholders: tuple[str, ...]
    outputs: tuple[Any, ...]
    """fx nodes (by name, as `NodeName`) or constants."""


_ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
_EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast


class NodeName(str):
    """The name of a value, as opposed to a constant string."""

    __slots__ = ()


def split(gm: fx.GraphModule, breakpoints: dict[str, Breakpoint]) -> SplitGraph:
    """Cut `gm` at every node whose target is in `breakpoints`. `gm` is not changed.

    Node order is kept, since graphs mutate their values; a `getitem` moves to its producer, a constant
    (`get_attr`) to each of its users.
    """
    working = fx.GraphModule(gm, _copy_graph(gm.graph))
    graph = working.graph
    _drop_grad_mode(graph)
    part_of, breaks = _assign(graph, breakpoints)
    _expand_containers(graph, part_of)
    return _build(working, part_of, breaks)


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = new.node_copy(node, lambda n: mapping[n])
        mapping[node].name = node.name
    return new


def _drop_grad_mode(graph: fx.Graph) -> None:
    """Everything runs without grad, so switches of grad mode mean nothing and must not straddle a boundary."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch._C._set_grad_enabled:
            graph.erase_node(node)


def _assign(
    graph: fx.Graph, breakpoints: dict[str, Breakpoint]
) -> tuple[dict[fx.Node, int], dict[int, Breakpoint]]:
    """The part of each node that computes, and which parts are breakpoints."""
    part_of: dict[fx.Node, int] = {}
    breaks: dict[int, Breakpoint] = {}
    current, closed = 0, True
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if _selects_from_container(node) and node.args[0] in part_of:
            part_of[node] = part_of[node.args[0]]
            continue
        found = match(node.target, breakpoints) if node.op != "call_module" else None
        if found is not None or closed:
            current, closed = current + 1, found is not None
        part_of[node] = current
        if found is not None:
            breaks[current] = found
    return part_of, breaks


def _selects_from_container(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and isinstance(source.meta.get("example_value"), tuple | list)


def _expand_containers(graph: fx.Graph, part_of: dict[fx.Node, int]) -> None:
    """Let no tuple, list or `torch.Size` cross a boundary.

    A container used in a later part is taken apart where it was made, and put together again where it is used;
    elements that are plain ints become constants.
    """
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if node not in part_of or not isinstance(value, tuple | list):
            continue
        foreign = [user for user in node.users if part_of.get(user, -1) != part_of[node]]
        if not foreign:
            continue
        elements = _take_apart(graph, node, value, part_of)
        for user in foreign:
            if _selects_from_container(user) and isinstance(user.args[1], int):
                _replace_everywhere(user, elements[user.args[1]])
                part_of.pop(user, None)
                graph.erase_node(user)
            else:
                user.replace_input_with(node, _put_together(graph, user, value, elements, part_of))


def _take_apart(graph: fx.Graph, node: fx.Node, value: Any, part_of: dict[fx.Node, int]) -> list[Any]:
    elements: list[Any] = []
    position = node
    for index, element in enumerate(value):
        if isinstance(element, torch.Tensor | torch.SymInt | tuple | list):
            with graph.inserting_after(position):
                position = graph.call_function(operator.getitem, (node, index))
            position.meta = {"example_value": element, "stack_trace": node.meta.get("stack_trace", "")}
            part_of[position] = part_of[node]
            elements.append(position)
        else:
            elements.append(element)
    return elements


def _put_together(
    graph: fx.Graph, user: fx.Node, value: Any, elements: list[Any], part_of: dict[fx.Node, int]
) -> fx.Node:
    make: Callable[..., Any] = torch.Size if isinstance(value, torch.Size) else type(value)
    with graph.inserting_before(user):
        whole = graph.call_function(make, (tuple(elements),))
    whole.meta = {"example_value": value}
    if user in part_of:
        part_of[whole] = part_of[user]
    else:  # the output node: the container is made by its last part
        part_of[whole] = max(part_of.values())
    return whole


def _replace_everywhere(node: fx.Node, replacement: Any) -> None:
    for user in list(node.users):
        mapped = fx.map_arg((user.args, user.kwargs), lambda n: replacement if n is node else n)
        user.args, user.kwargs = mapped


def _build(gm: fx.GraphModule, part_of: dict[fx.Node, int], breaks: dict[int, Breakpoint]) -> SplitGraph:
    order = [node for node in gm.graph.nodes if node in part_of]
    parts: dict[int, list[fx.Node]] = {}
    for node in order:
        parts.setdefault(part_of[node], []).append(node)
    _read_symbols_from_placeholders(gm.graph, part_of)
    symbols = _symbol_sources(gm.graph)
    open_contexts = _open_autocasts(parts)
    segments = tuple(
        _build_segment(gm, nodes, part_of, breaks.get(part), symbols, open_contexts[part])
        for part, nodes in sorted(parts.items())
    )
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    outputs = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
    return SplitGraph(
        segments=segments,
        placeholders=tuple(node.name for node in gm.graph.nodes if node.op == "placeholder"),
        outputs=tuple(NodeName(o.name) if isinstance(o, fx.Node) else o for o in outputs),
    )


def _read_symbols_from_placeholders(graph: fx.Graph, part_of: dict[fx.Node, int]) -> None:
    """A size that is just a shape symbol is read from the graph's own input, not carried from piece to piece."""
    sources = {s: node for s, node in _symbol_sources(graph).items() if node.op == "placeholder"}
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if node in part_of and isinstance(value, torch.SymInt) and value.node.expr in sources:
            for user in [u for u in node.users if part_of.get(u) != part_of[node]]:
                user.replace_input_with(node, sources[value.node.expr])


def _open_autocasts(parts: dict[int, list[fx.Node]]) -> dict[int, tuple[fx.Node, ...]]:
    """The autocast regions that are open when each part begins, outermost first."""
    stack: list[fx.Node] = []
    found: dict[int, tuple[fx.Node, ...]] = {}
    for part, nodes in sorted(parts.items()):
        found[part] = tuple(stack)
        for node in nodes:
            if node.target is _ENTER_AUTOCAST:
                stack.append(node)
            elif node.target is _EXIT_AUTOCAST and node.args[0] in stack:
                stack.remove(node.args[0])
    return found


def _symbol_sources(graph: fx.Graph) -> dict[Any, fx.Node]:
    """The first node whose value is exactly a shape symbol, for each symbol."""
    sources: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
            sources.setdefault(value.node.expr, node)
    return sources


def _build_segment(
    gm: fx.GraphModule,
    nodes: list[fx.Node],
    part_of: dict[fx.Node, int],
    found: Breakpoint | None,
    symbols: dict[Any, fx.Node],
    open_autocasts: tuple[fx.Node, ...],
) -> Segment:
    part = part_of[nodes[0]]
    inside = {*nodes, *open_autocasts}
    external = [
        n for n in dict.fromkeys(a for node in nodes for a in node.all_input_nodes)
        if n not in inside and n.op != "get_attr"
    ]
    if found is None:  # a compiled piece needs the symbols of its inputs' shapes as inputs of their own
        needed = (s for n in external for s in free_symbols(n.meta.get("example_value")))
        sources = [symbols[s] for s in dict.fromkeys(needed) if s in symbols and symbols[s] not in inside]
        external = list(dict.fromkeys([*sources, *external]))
    returned = [
        node for node in nodes
        if node.target is not _ENTER_AUTOCAST and any(part_of.get(user) != part for user in node.users)
    ]

    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in external:
        mapping[node] = graph.placeholder(node.name)
        mapping[node].meta = {k: v for k, v in node.meta.items() if k in ("example_value", "tensor_dict")}
    # A region of autocast that spans several parts is entered and left again in each of them.
    for node in open_autocasts:
        mapping[node] = graph.node_copy(node)
    for node in nodes:
        for constant in node.all_input_nodes:
            if constant.op == "get_attr" and constant not in mapping:
                mapping[constant] = graph.node_copy(constant)
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    closed = {node.args[0] for node in nodes if node.target is _EXIT_AUTOCAST}
    entered = [n for n in (*open_autocasts, *nodes) if n.target is _ENTER_AUTOCAST and n not in closed]
    for node in reversed(entered):
        graph.call_function(_EXIT_AUTOCAST, (mapping[node],))
    graph.output(tuple(mapping[node] for node in returned))
    return Segment(
        module=fx.GraphModule(gm, graph),
        inputs=tuple(node.name for node in external),
        outputs=tuple(node.name for node in returned),
        breakpoint=found,
        nodes=tuple(node.name for node in nodes),
    )


def free_symbols(value: Any) -> list[Any]:
    """Shape symbols in a fake tensor's sizes, strides and offset, or in a symbolic int; in a fixed order."""
    if isinstance(value, torch.SymInt):
        return sorted(value.node.expr.free_symbols, key=str)
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        numbers = (*value.shape, *value.stride(), value.storage_offset()) if strided else value.shape
        found = dict.fromkeys(s for n in numbers for s in free_symbols(n))
        return list(found)
    return []
