"""A small FX graph as plain data: an operator between pieces, or a piece of views, which no compiler keeps on disk."""

from __future__ import annotations

import math
import operator
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.amp.autocast_mode
from torch import fx

from piecewise_backend import regions
from piecewise_backend.runner.symbolic import NotPlain

_MODULES: dict[str, Any] = {
    module.__name__: module for module in (torch, torch.nn.functional, torch.Tensor, operator, math, regions)
} | {"torch._C._nn": torch._C._nn, "torch.amp.autocast_mode": torch.amp.autocast_mode}
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def graph_rows(gm: fx.GraphModule) -> list[list[Any]]:
    """One row a node: operation, name, target, arguments, keyword arguments. NotPlain for what no row can hold: a
    constant tensor, a subgraph, a function that cannot be found by its name."""
    places = {node: i for i, node in enumerate(gm.graph.nodes)}

    def written(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"node": places[value]}
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, list):
            return [written(v) for v in value]
        if isinstance(value, tuple):
            return {"tuple": [written(v) for v in value]}
        if isinstance(value, dict) and all(type(k) is str for k in value):
            return {"dict": {k: written(v) for k, v in value.items()}}
        if isinstance(value, slice):
            return {"slice": [written(v) for v in (value.start, value.stop, value.step)]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, _TORCH_CONSTANTS):
            return {"torch": str(value).removeprefix("torch.")}
        if value is Ellipsis:
            return {"ellipsis": True}
        raise NotPlain(f"an argument that is a {type(value).__name__}")

    return [
        [node.op, node.name, _target_row(node), written(node.args), written(dict(node.kwargs))]
        for node in gm.graph.nodes
    ]


def read_graph(rows: Sequence[Sequence[Any]]) -> fx.Graph:
    """The graph of such rows. LookupError or AttributeError where a function is not there."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return [read(v) for v in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        return _READ[kind](content, read) if kind != "node" else nodes[content]

    for op, name, target, args, kwargs in rows:
        nodes.append(graph.create_node(op, _target(target), read(args), read(kwargs), name=name))
    return graph


_READ: dict[str, Any] = {
    "tuple": lambda content, read: tuple(map(read, content)),
    "dict": lambda content, read: {k: read(v) for k, v in content.items()},
    "slice": lambda content, read: slice(*map(read, content)),
    "device": lambda content, _: torch.device(content),
    "torch": lambda content, _: _torch_constant(content),
    "ellipsis": lambda content, _: Ellipsis,
}


def _torch_constant(name: str) -> Any:
    found = getattr(torch, name)
    assert isinstance(found, _TORCH_CONSTANTS), name
    return found


def _target_row(node: fx.Node) -> Any:
    target: Any = node.target
    if isinstance(target, str) and node.op in ("placeholder", "output", "call_method"):
        return target
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        return ["operator", namespace, name, target._overloadname]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return ["operator", *target._qualified_op_name.split("::"), None]
    name = getattr(target, "__name__", "")
    for module, content in _MODULES.items():
        if node.op == "call_function" and name and getattr(content, name, None) is target:
            return ["function", module, name]
    if isinstance(target, types.FunctionType) and _user_function(target.__module__, target.__qualname__) is target:
        return ["user function", target.__module__, target.__qualname__]
    raise NotPlain(f"the {node.op} of {target}")


def _target(row: Any) -> Any:
    if isinstance(row, str):
        return row
    kind, *path = row
    if kind == "operator":
        namespace, name, overload = path
        packet = getattr(getattr(torch.ops, namespace), name)
        return packet if overload is None else getattr(packet, overload)
    if kind == "user function":
        return _user_function(*path)
    return getattr(_MODULES[path[0]], path[1])


def _user_function(module: str, name: str) -> Any:
    """A function of a module that is imported already. LookupError where it is not."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise LookupError(f"{module}.{name} is not imported")
    return found
