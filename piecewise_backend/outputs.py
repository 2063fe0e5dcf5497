"""From static outputs to results of the caller's own.

A fresh result is cloned, results that share memory are cloned together, a view of an input is made again on the
caller's own input, and a view of memory recorded at its own address (a parameter, a cache that is written) is handed
out as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from piecewise_backend.program import Constant, Program

_Make = Callable[[Sequence[Any], Sequence[Any], int], Any]
"""(static outputs, the call's arguments, real rows) to one result."""


class OutputPlan:
    """How each output of a program becomes the caller's; decided once from what the trace says of memory."""

    def __init__(self, program: Program, gm: fx.GraphModule, own_address: Sequence[int]) -> None:
        self._dim = program.token_dim
        self._fakes = program.output_fakes
        inputs = program.inputs
        own = {inputs[i].storage for i in own_address}
        copied = {i.storage for i in inputs if i.storage >= 0} - own
        views_of_inputs = [n for n, s in enumerate(program.output_storage) if s in copied]
        self._shared: dict[int, _SharedMemory] = {}
        self._views = _ViewsOfInputs(gm, views_of_inputs) if views_of_inputs else None
        self._makes = [self._make(program, n, own, views_of_inputs) for n in range(len(program.outputs))]

    def hand_out(self, static: Sequence[Any], args: Sequence[Any], count: int) -> tuple[Any, ...]:
        """Results for the caller; `static` outputs may be overwritten afterwards."""
        return tuple([make(static, args, count) for make in self._makes])

    def _make(self, program: Program, index: int, own: set[int], views_of_inputs: list[int]) -> _Make:
        output, fake, storage = program.outputs[index], self._fakes[index], program.output_storage[index]
        if isinstance(output, Constant):
            return lambda static, args, count: output.value
        if isinstance(fake, torch.SymInt):
            return lambda static, args, count: self._dim.evaluate(fake, count)
        if not isinstance(fake, torch.Tensor):
            return lambda static, args, count: static[index]
        if index in views_of_inputs:
            views, position = self._views, views_of_inputs.index(index)
            assert views is not None
            return lambda static, args, count: views(args)[position]
        if storage in own:
            return lambda static, args, count: static[index].detach()
        shared = [n for n, s in enumerate(program.output_storage) if s == storage and storage >= 0]
        if len(shared) > 1:
            return self._make_shared(index, shared)
        if not self._dim.dims(fake):
            return lambda static, args, count: static[index].clone()
        return lambda static, args, count: self._dim.narrow(static[index], fake, count).clone()

    def _make_shared(self, index: int, shared: list[int]) -> _Make:
        memory = self._shared.setdefault(shared[0], _SharedMemory(first=shared[0]))
        return lambda static, args, count: memory.view(index, self._dim.narrow(static[index], self._fakes[index], count))


class _SharedMemory:
    """Outputs that share memory: the first one made clones all of it, the others are views of that clone."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._clone: torch.UntypedStorage | None = None

    def view(self, index: int, static: torch.Tensor) -> torch.Tensor:
        if index == self._first:
            self._clone = static.untyped_storage().clone()
        assert self._clone is not None
        empty = torch.empty(0, dtype=static.dtype, device=static.device)
        return empty.set_(self._clone, static.storage_offset(), static.shape, static.stride())


class _ViewsOfInputs:
    """The part of a graph that makes views of its inputs, run on the caller's own tensors."""

    def __init__(self, gm: fx.GraphModule, indices: Sequence[int]) -> None:
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        (output,) = (n for n in gm.graph.nodes if n.op == "output")
        needed = _ancestors([output.args[0][i] for i in indices])
        for node in gm.graph.nodes:
            if node.op == "placeholder" or node in needed:
                mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        graph.output(tuple(mapping[output.args[0][i]] for i in indices))
        self._module = fx.GraphModule(gm, graph)

    def __call__(self, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        return self._module.forward(*args)


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found
