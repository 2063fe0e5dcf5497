"""Subgraphs that only group nodes, put in place of the call that runs them, so that breakpoints inside break too.

before: body = get_attr(...); y = invoke_subgraph(body, "layer", x, w)[0]
after:  h = linear(x, w); y = attention(h)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from piecewise_backend.regions import settings_kept

# What these add to calling their body (recomputing in a backward pass, compiling once) has no meaning here.
_GROUPS = {"tag_activation_checkpoint": 1, "wrap_activation_checkpoint": 1, "wrap": 1, "invoke_subgraph": 2}
"""Operator to the number of its leading arguments that are not the body's."""


def inline_subgraphs(gm: fx.GraphModule) -> fx.GraphModule:
    """`gm` with its groups inlined; `gm` itself, unchanged, if there are none."""
    if not any(_is_group(node) for node in gm.graph.nodes):
        return gm
    inliner = _Inliner(gm)
    graph = inliner.inline()
    return fx.GraphModule(inliner.root, graph, class_name=type(gm).__name__)


def _is_group(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.HigherOrderOperator) and target.name() in _GROUPS


class _Inliner:
    """Copies a graph node by node, and finds each value's example again: a body that two calls share carries the
    examples of one of them, and so would make the values of both look like the same memory."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.root = torch.nn.Module()
        self.graph = fx.Graph()
        fakes = (
            leaf
            for n in gm.graph.nodes
            for leaf in tree_leaves(n.meta.get("example_value"))
            if isinstance(leaf, torch._subclasses.FakeTensor)
        )
        self.fake_mode = next(fakes).fake_mode

    def inline(self) -> fx.Graph:
        placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        copies: list[Any] = [self.graph.node_copy(node) for node in placeholders]
        with torch.no_grad(), settings_kept(), enable_python_dispatcher(), self.fake_mode:
            result = self._copy_body(self.gm, copies)
        self.graph.output(result)
        return self.graph

    def _copy_body(self, body: fx.GraphModule, arguments: list[Any]) -> Any:
        given = iter(arguments)
        env: dict[fx.Node, Any] = {}
        for node in body.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "output":
                return fx.map_arg(node.args[0], lambda n: env[n])
            elif _is_group(node):
                env[node] = self._copy_group(body, node, env)
            elif any(isinstance(env.get(n), tuple | list) for n in node.all_input_nodes):
                assert node.target is operator.getitem, f"{node.name} uses the result of a group as a whole"
                env[node] = operator.getitem(*fx.map_arg(node.args, lambda n: env[n]))
            else:
                env[node] = self._copy_node(body, node, env)
        raise AssertionError("a graph ends with its output")

    def _copy_group(self, body: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        assert isinstance(node.target, torch._ops.HigherOrderOperator)
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        assert inner.op == "get_attr", f"{node.name} runs a body that is not part of the graph"
        arguments = fx.map_arg(node.args[_GROUPS[node.target.name()] :], lambda n: env[n])
        return self._copy_body(getattr(body, str(inner.target)), list(arguments))

    def _copy_node(self, body: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        new = self.graph.node_copy(node, lambda n: env[n])
        if node.op == "get_attr":
            name = f"{node.target}".replace(".", "_")
            while hasattr(self.root, name):
                name += "_"
            setattr(self.root, name, _attribute(body, str(node.target)))
            new.target = name
        elif not free_unbacked_symbols(node.meta.get("example_value")):
            new.meta["example_value"] = self._run(new)
        return new

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("example_value"))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "call_function" and not isinstance(node.target, torch._ops.HigherOrderOperator):
            return node.target(*args, **kwargs)  # type: ignore[operator]
        return node.meta.get("example_value")


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    found: Any = gm
    for part in target.split("."):
        found = getattr(found, part)
    return found
