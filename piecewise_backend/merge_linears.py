"""Linear layers that read the same tensor, made one: fewer and larger matrix products.

before: q = linear(x, w_q); k = linear(x, w_k); v = linear(x, w_v)
after:  y = linear(x, w); q = y[..., :a]; k = y[..., a:b]; v = y[..., b:]

At decode sizes a small product costs as much as its launch, and a step of a language model has seven a layer.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from piecewise_backend.regions import find_regions, switches_of
from piecewise_backend.writes import may_write, share_memory

logger = logging.getLogger(__name__)

_LINEAR = (torch.nn.functional.linear, torch._C._nn.linear)


@dataclass(frozen=True, slots=True)
class _Group:
    """Linear nodes of one input, and the places of their weights and biases among the graph's inputs."""

    nodes: tuple[fx.Node, ...]
    weights: tuple[int, ...]
    biases: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged parameter, and the places of those it was merged from."""

    places: tuple[int, ...]
    tensor: torch.Tensor


def merge_linears(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[int | Merged]]:
    """`gm` with its linear layers merged where they read the same tensor, and where each of its inputs comes from: the
    place of one of `inputs`, or a merged parameter.

    `inputs`: the real ones. Merged parameters become views of the tensor they were merged into, so the model keeps
    working and no memory is lost. `gm` is unchanged; it is returned as it is, with its parameters untouched, where
    there is nothing to merge, or where other nodes do not take the parts, which have other strides.
    """
    groups = _find_groups(gm, inputs)
    unchanged: list[int | Merged] = list(range(len(inputs)))
    if not groups:
        return gm, unchanged
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    outputs = graph.graph_copy(gm.graph, mapping)
    graph.output(outputs)
    merged = fx.GraphModule(gm, graph, class_name=type(gm).__name__)
    plan = [_merge(graph, group, mapping, inputs) for group in groups]
    try:
        _find_examples_again(graph)
    except Exception as error:
        logger.info("linear layers stay apart: %s: %s", type(error).__name__, str(error).splitlines()[:1])
        return gm, unchanged
    tensors = {node: Merged(places, join([inputs[i] for i in places])) for made in plan for node, places in made}
    place_of = {mapping[node]: i for i, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    merged.recompile()
    sources = [tensors.get(n, place_of.get(n)) for n in graph.nodes if n.op == "placeholder"]
    return merged, sources  # type: ignore[return-value]


def _find_groups(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[_Group]:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    place_of = {node: i for i, node in enumerate(placeholders)}
    regions = find_regions(gm.graph).around
    alike: dict[Any, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _LINEAR and not node.kwargs:
            x, weight, bias = (*node.args, None)[:3]
            if isinstance(x, fx.Node) and all(_is_parameter(p, place_of, inputs) for p in (weight, bias) if p):
                tensor = inputs[place_of[weight]]
                key = (x, regions.get(node, ()), tensor.dtype, tensor.device, bias is None)
                alike.setdefault(key, []).append(node)
    return [
        _Group(
            tuple(nodes),
            tuple(place_of[n.args[1]] for n in nodes),
            None if without_bias else tuple(place_of[n.args[2]] for n in nodes),
        )
        for (*_, without_bias), alike_nodes in alike.items()
        for nodes in _between_writes(alike_nodes)
        if len(nodes) > 1
    ]


def _between_writes(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Linear nodes of one input, in order, in lists between which something writes to it."""
    parts: list[list[fx.Node]] = [[]]
    node, x = nodes[0], nodes[0].args[0]
    assert isinstance(x, fx.Node)
    while node is not nodes[-1]:
        if node in nodes:
            parts[-1].append(node)
        elif parts[-1] and may_write(node, x):
            parts.append([])
        node = node.next
    parts[-1].append(node)
    return parts


def _is_parameter(node: Any, place_of: dict[fx.Node, int], inputs: Sequence[Any]) -> bool:
    """Whether a value is a whole, contiguous parameter that only one node reads."""
    if not isinstance(node, fx.Node) or node not in place_of or len(node.users) != 1:
        return False
    tensor = inputs[place_of[node]]
    return isinstance(tensor, torch.nn.Parameter) and type(tensor.data) is torch.Tensor and tensor.is_contiguous()


def _merge(
    graph: fx.Graph, group: _Group, mapping: dict[fx.Node, fx.Node], inputs: Sequence[Any]
) -> list[tuple[fx.Node, tuple[int, ...]]]:
    """Put one linear node in place of a group's; returns the new inputs and the places of what they are joined from."""
    nodes = [mapping[node] for node in group.nodes]
    made = [(_new_input(graph, [n.args[1] for n in nodes], group.weights, inputs), group.weights)]
    if group.biases is not None:
        made.append((_new_input(graph, [n.args[2] for n in nodes], group.biases, inputs), group.biases))
    with graph.inserting_before(nodes[0]):
        parameters = [node for node, _ in made]
        whole = graph.call_function(torch.nn.functional.linear, (nodes[0].args[0], *parameters))
        whole.meta = {k: v for k, v in nodes[0].meta.items() if k != "example_value"}
        start = 0
        for node, place in zip(nodes, group.weights, strict=True):
            stop = start + inputs[place].shape[0]
            rows: Any = (Ellipsis, slice(start, stop))
            part = graph.call_function(operator.getitem, (whole, rows))
            part.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
            node.replace_all_uses_with(part)
            start = stop
    for node in nodes:
        old = [n for n in node.args[1:] if isinstance(n, fx.Node)]
        graph.erase_node(node)
        for parameter in old:
            graph.erase_node(parameter)
    return made


def _new_input(graph: fx.Graph, old: Sequence[Any], places: Sequence[int], inputs: Sequence[Any]) -> fx.Node:
    first, examples = old[0], [n.meta["example_value"] for n in old]
    with graph.inserting_before(first):
        node = graph.placeholder(f"merged_{first.name}")
    with torch.no_grad(), examples[0].fake_mode:
        example = torch.cat(examples)
    node.meta = {"example_value": example, "tensor_dict": first.meta.get("tensor_dict")}
    return node


def join(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of which the parameters are views from now on, one after another along the first dimension."""
    first = parameters[0]
    shape = (sum(p.shape[0] for p in parameters), *first.shape[1:])
    offset = first.storage_offset()
    for parameter in parameters:
        if parameter.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            break
        if parameter.storage_offset() != offset:
            break
        offset += parameter.numel()
    else:  # joined before, for another runner
        return first.data.as_strided(shape, first.stride())
    with torch.no_grad():
        joined = torch.cat([p.data for p in parameters])
        for parameter, part in zip(parameters, joined.split([p.shape[0] for p in parameters]), strict=True):
            parameter.data = part
    return joined


def _find_examples_again(graph: fx.Graph) -> None:
    """Run the nodes without an example, and those that read one of another layout than before, on examples."""
    fake_mode = next(
        n.meta["example_value"].fake_mode
        for n in graph.nodes
        if isinstance(n.meta.get("example_value"), torch._subclasses.FakeTensor)
    )
    fresh = fake_mode.shape_env.ignore_fresh_unbacked_symbols() if fake_mode.shape_env else contextlib.nullcontext()
    changed: set[fx.Node] = set()
    with torch.no_grad(), enable_python_dispatcher(), fresh, fake_mode, switches_of(graph) as switches:
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method") or switches.run(node):
                continue
            before = node.meta.get("example_value")
            is_new = node.target is torch.nn.functional.linear and "example_value" not in node.meta
            if not is_new and changed.isdisjoint(node.all_input_nodes):
                continue
            if isinstance(node.target, torch._ops.HigherOrderOperator) or free_unbacked_symbols(before):
                continue
            example = _run_on_examples(node)
            # A view of what has a new example is of new memory, however it is laid out. Else, alike, the old example
            # stays: nodes that are not run again may be views of it.
            read = [n.meta["example_value"] for n in changed.intersection(node.all_input_nodes)]
            of_changed = share_memory(example, read)
            if is_new or of_changed or _layouts(before) != _layouts(example):
                node.meta["example_value"] = example
                changed.add(node)


def _run_on_examples(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("example_value"))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _layouts(value: Any) -> list[Any]:
    """Sizes, strides and dtypes of the tensors in `value`, as expressions: comparing those decides no symbolic size."""
    return [
        (leaf.dtype, *(_expression(n) for n in (*leaf.shape, *leaf.stride(), leaf.storage_offset())))
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]


def _expression(number: Any) -> Any:
    return number.node.expr if isinstance(number, torch.SymInt) else number
