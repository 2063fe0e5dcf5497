"""Tuples, lists and `torch.Size` taken apart where they would cross from one segment to another."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


def selects_from_container(node: fx.Node) -> bool:
    """Whether `node` is an element of a tuple or list that another node returned."""
    if node.op != "call_function" or node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and isinstance(source.meta.get("example_value"), tuple | list)


def expand_containers(graph: fx.Graph, part_of: dict[fx.Node, int]) -> None:
    """Change `graph` so that no tuple, list or `torch.Size` crosses a boundary; `part_of` is kept up to date.

    A container used in a later part is taken apart where it was made, and put together again where it is used;
    elements that are plain ints become constants.
    """
    for node in list(graph.nodes):
        value = node.meta.get("example_value")
        if node not in part_of or not isinstance(value, tuple | list):
            continue
        foreign = [user for user in node.users if user in part_of and part_of[user] != part_of[node]]
        if not foreign:
            continue
        elements = _take_apart(graph, node, value, part_of)
        for user in foreign:
            if selects_from_container(user) and isinstance(user.args[1], int):
                _replace_everywhere(user, elements[user.args[1]])
                part_of.pop(user)
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
    part_of[whole] = part_of[user]
    return whole


def _replace_everywhere(node: fx.Node, replacement: Any) -> None:
    for user in list(node.users):
        mapped = fx.map_arg((user.args, user.kwargs), lambda n: replacement if n is node else n)
        user.args, user.kwargs = mapped
