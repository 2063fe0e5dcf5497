"""FX graph to pieces and breakpoints.

Before (one graph, as Dynamo made it):

    h = linear(x, w0);  q = h.view(...);  attention(q, cache, out);  s = h.shape;  y = out.view(s);  z = linear(y, w1)

After (three segments; only tensors and ints cross):

    piece 0:      (x, w0) -> h, q, out
    breakpoint 1: (q, cache, out) -> ()
    piece 2:      (out, w1, s0) -> z
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from piecewise_backend.breakpoints import Breakpoint, match
from piecewise_backend.containers import expand_containers, selects_from_container
from piecewise_backend.regions import Regions, RegionWriter, find_regions
from piecewise_backend.structure import structure_text
from piecewise_backend.views import check_shapes_kept, rebuild_views


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of nodes that executes as one unit."""

    module: fx.GraphModule
    """Takes the values named `inputs`, returns a tuple of the values named `outputs`."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    breakpoint: Breakpoint | None
    """The operator that breaks here; None for a piece."""
    structure: str
    """`structure_text` of `module`."""


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """Segments in execution order, and the names that enter and leave the whole."""

    segments: tuple[Segment, ...]
    placeholders: tuple[str, ...]
    outputs: tuple[Any, ...]
    """fx nodes (by name, as `NodeName`) or constants."""


_TRANSFORM_BEGINS = frozenset(
    {"_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting", "_enter_dual_level"}
)
_TRANSFORM_ENDS = frozenset(
    {"_vmap_decrement_nesting", "_grad_decrement_nesting", "_jvp_decrement_nesting", "_exit_dual_level"}
)


class NodeName(str):
    """The name of a value, as opposed to a constant string."""

    __slots__ = ()


def split(gm: fx.GraphModule, breakpoints: dict[str, Breakpoint]) -> SplitGraph:
    """Cut `gm` at every node whose target is in `breakpoints`. `gm` is not changed.

    Node order is kept, since graphs mutate their values; a `getitem` moves to its producer, a constant
    (`get_attr`) and the switch of a setting (autocast) to each segment that needs it.
    """
    working = fx.GraphModule(gm, _copy_graph(gm.graph))
    graph = working.graph
    regions = find_regions(graph)
    part_of, breaks = _assign(graph, breakpoints, regions.marks)
    check_shapes_kept(graph, part_of)
    expand_containers(graph, part_of)
    compiled = [part for part in set(part_of.values()) if part not in breaks or breaks[part].compiled]
    rebuild_views(graph, part_of, compiled)
    return _build(working, part_of, breaks, regions)


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = new.node_copy(node, lambda n: mapping[n])
        mapping[node].name = node.name
    return new


def _assign(
    graph: fx.Graph, breakpoints: dict[str, Breakpoint], marks: frozenset[fx.Node]
) -> tuple[dict[fx.Node, int], dict[int, Breakpoint]]:
    """The part of each node that computes, and which parts are breakpoints."""
    part_of: dict[fx.Node, int] = {}
    breaks: dict[int, Breakpoint] = {}
    current, closed, nesting = 0, True, 0
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node in marks:
            continue
        if _reads_result(node) and node.args[0] in part_of:
            part_of[node] = part_of[node.args[0]]
            continue
        nesting += _transform_nesting(node)
        found = match(node.target, breakpoints) if node.op != "call_module" and not nesting else None
        if found is not None or closed:
            current, closed = current + 1, found is not None
        part_of[node] = current
        if found is not None:
            breaks[current] = found
    return part_of, breaks


def _transform_nesting(node: fx.Node) -> int:
    """+1 where a function transform (`vmap`, `grad`, `jvp`) begins, -1 where it ends.

    What is between sees batched values that exist only there, so it is never cut apart.
    """
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return (name in _TRANSFORM_BEGINS) - (name in _TRANSFORM_ENDS)


def _reads_result(node: fx.Node) -> bool:
    """Whether `node` belongs to its producer: an element of its tuple, or the size of its data-dependent shape."""
    if node.op == "call_function" and node.target is torch.ops.aten.sym_size.int:
        value = node.meta.get("example_value")
        return isinstance(value, torch.SymInt) and value.node.expr.free_symbols <= set(free_unbacked_symbols(value))
    return selects_from_container(node)


def _build(
    gm: fx.GraphModule, part_of: dict[fx.Node, int], breaks: dict[int, Breakpoint], regions: Regions
) -> SplitGraph:
    parts: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node in part_of:
            parts.setdefault(part_of[node], []).append(node)
    _read_symbols_from_placeholders(gm.graph, part_of)
    symbols = _symbol_sources(gm.graph)
    compiled = {part for part in parts if part not in breaks or breaks[part].compiled}
    inputs = {part: _inputs(nodes, part_of, part in compiled, symbols) for part, nodes in parts.items()}
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    used = set(output.all_input_nodes).union(*inputs.values())
    segments = tuple(
        _build_segment(gm, nodes, inputs[part], [n for n in nodes if n in used], breaks.get(part), regions)
        for part, nodes in sorted(parts.items())
    )
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


def _symbol_sources(graph: fx.Graph) -> dict[Any, fx.Node]:
    """The first node whose value is exactly a shape symbol, for each symbol."""
    sources: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
            sources.setdefault(value.node.expr, node)
    return sources


def _inputs(
    nodes: list[fx.Node], part_of: dict[fx.Node, int], is_compiled: bool, symbols: dict[Any, fx.Node]
) -> list[fx.Node]:
    """The values that a part takes from outside of it, in order of use."""
    part = part_of[nodes[0]]
    external = [n for n in dict.fromkeys(a for node in nodes for a in node.all_input_nodes) if part_of.get(n) != part]
    external = [n for n in external if n.op == "placeholder" or n in part_of]
    if not is_compiled:
        return external
    # Compiled code needs the symbols of its inputs' shapes as inputs of their own.
    needed = dict.fromkeys(s for n in external for s in free_symbols(n.meta.get("example_value")))
    sources = [symbols[s] for s in needed if s in symbols and part_of.get(symbols[s], -1) < part]
    return list(dict.fromkeys([*sources, *external]))


def _build_segment(
    gm: fx.GraphModule,
    nodes: list[fx.Node],
    inputs: list[fx.Node],
    outputs: list[fx.Node],
    found: Breakpoint | None,
    regions: Regions,
) -> Segment:
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        mapping[node] = graph.placeholder(node.name)
        mapping[node].meta = {k: v for k, v in node.meta.items() if k in ("example_value", "tensor_dict")}
    writer = RegionWriter(graph)
    for node in nodes:
        for constant in node.all_input_nodes:
            if constant.op == "get_attr" and constant not in mapping:
                mapping[constant] = graph.node_copy(constant)
        writer.move_to(regions.around.get(node, ()))
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    writer.move_to(())
    graph.output(tuple(mapping[node] for node in outputs))
    module = fx.GraphModule(gm, graph)
    return Segment(
        module=module,
        inputs=tuple(node.name for node in inputs),
        outputs=tuple(node.name for node in outputs),
        breakpoint=found,
        # Before anything is compiled, which may add guards to shared shape symbols.
        structure=structure_text(module),
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
