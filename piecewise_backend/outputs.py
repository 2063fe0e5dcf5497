"""From static outputs to results of the caller's own.

A computed result is copied; results that share memory share it in the copy too. A view of an input is made again on
the caller's own input, and memory recorded at its own address (a parameter, a cache that is written) is handed out as
it is. Sizes and strides are those of an unpadded run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from piecewise_backend.cudagraph.rows import expanded_dims, first_along, span
from piecewise_backend.program import Constant, Program

Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Sizes, strides, offset in elements."""


class OutputPlan:
    """How each output of a program becomes the caller's; decided once from what the trace says of memory."""

    def __init__(self, program: Program, gm: fx.GraphModule, own_address: Sequence[int]) -> None:
        self._program, self._dim = program, program.token_dim
        inputs = program.inputs
        self._own = {inputs[i].storage: i for i in reversed(own_address)}
        copied = {i.storage for i in inputs if i.storage >= 0} - self._own.keys()
        views = [n for n, s in enumerate(program.output_storage) if s in copied]
        self._views_of_inputs = (_views_of_inputs(gm, views), views) if views else None

    def bind(self, static: Sequence[Any], static_args: Sequence[Any], count: int | None) -> HandOut:
        """How results get out of the `static` outputs, cut to `count` real rows (None: they are not padded)."""
        plan = HandOut(len(static), self._views_of_inputs)
        memories: dict[int, list[int]] = {}
        views = self._views_of_inputs[1] if self._views_of_inputs else ()
        for index, value in enumerate(static):
            storage = self._program.output_storage[index]
            if not isinstance(value, torch.Tensor):
                plan.values[index] = self._number(index, value, count)
            elif index in views:
                continue
            elif storage in self._own:
                plan.own.append(self._in_own_memory(index, value, static_args, self._own[storage]))
            elif value.layout is not torch.strided:
                plan.others.append((index, value))
            else:
                memories.setdefault(storage if storage >= 0 else -1 - index, []).append(index)
        for group in memories.values():
            plan.add_memory([(n, *self._layout(n, static[n], count)) for n in group])
        return plan.group()

    def _number(self, index: int, value: Any, count: int | None) -> Any:
        if isinstance(self._program.outputs[index], Constant) or count is None:
            return value
        return self._dim.narrow(value, self._program.output_fakes[index], count)

    def _layout(self, index: int, static: torch.Tensor, count: int | None) -> tuple[torch.Tensor, Layout]:
        """The real rows of a static output, and how an unpadded run would have laid them out."""
        if count is None:
            return static, (tuple(static.shape), static.stride(), int(static.storage_offset()))
        fake = self._program.output_fakes[index]
        return self._dim.narrow(static, fake, count), self._dim.layout(fake, count)

    @staticmethod
    def _in_own_memory(
        index: int, static: torch.Tensor, static_args: Sequence[Any], arg: int
    ) -> tuple[int, int, torch.dtype, Layout]:
        """A view of an argument, in terms of that argument: the offset is relative to it, in bytes."""
        offset = static.data_ptr() - static_args[arg].data_ptr() if static.numel() else 0
        return index, arg, static.dtype, (tuple(static.shape), static.stride(), offset)


class HandOut:
    """Makes the caller's results of one call; what can be known before the call is worked out once."""

    def __init__(self, num_outputs: int, views_of_inputs: tuple[Callable[..., Any], list[int]] | None) -> None:
        self.values: list[Any] = [None] * num_outputs
        self.own: list[tuple[int, int, torch.dtype, Layout]] = []
        self.others: list[tuple[int, torch.Tensor]] = []
        self._views_of_inputs = views_of_inputs
        self._dense: list[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]] = []
        self._shared: list[tuple[int, torch.device, list[tuple[int, torch.dtype, Layout, tuple[int, ...]]]]] = []
        self._dense_sources: list[torch.Tensor] = []
        self._shared_sources: list[torch.Tensor] = []
        self._groups: list[tuple[list[int], list[torch.Tensor]]] = []
        """(positions among dense and then shared results, static views to copy from)."""

    def add_memory(self, outputs: list[tuple[int, torch.Tensor, tuple[Any, ...]]]) -> None:
        """One computed output, or several that share memory: (index, static real rows, layout)."""
        (index, static, (sizes, strides, _)) = outputs[0]
        if len(outputs) == 1 and span(sizes, strides) == static.numel() and not expanded_dims(static):
            self._dense.append((index, sizes, strides, static.dtype, static.device))
            self._dense_sources.append(static)
            return
        lowest = min(offset * value.element_size() for _, value, (_, _, offset) in outputs)
        num_bytes, views = 0, []
        for index, value, (sizes, strides, offset) in outputs:
            width = value.element_size()
            first = (offset * width - lowest) // width
            num_bytes = max(num_bytes, (first + span(sizes, strides)) * width)
            repeated = tuple(d for d, (n, s) in enumerate(zip(sizes, strides, strict=True)) if s == 0 and n > 1)
            views.append((index, value.dtype, (sizes, strides, first), repeated))
        self._shared.append((-(-num_bytes // 16) * 16, outputs[0][1].device, views))
        for (_, value, _), (*_, repeated) in zip(outputs, views, strict=True):
            self._shared_sources.append(first_along(value, repeated))

    def group(self) -> HandOut:
        """Sort the copies by dtype and device: one launch each."""
        groups: dict[Any, tuple[list[int], list[torch.Tensor]]] = {}
        for position, source in enumerate([*self._dense_sources, *self._shared_sources]):
            positions, sources = groups.setdefault((source.dtype, source.device), ([], []))
            positions.append(position)
            sources.append(source)
        self._groups = list(groups.values())
        return self

    def __call__(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Results for the caller of `args`; the static outputs may be overwritten afterwards."""
        results, targets = self.values.copy(), []
        for index, sizes, strides, dtype, device in self._dense:
            results[index] = made = torch.empty_strided(sizes, strides, dtype=dtype, device=device)
            targets.append(made)
        for num_bytes, device, views in self._shared:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            for index, dtype, (sizes, strides, offset), repeated in views:
                results[index] = made = memory.view(dtype).as_strided(sizes, strides, offset)
                targets.append(first_along(made, repeated))
        for positions, sources in self._groups:
            torch._foreach_copy_([targets[p] for p in positions], sources)
        for index, arg, dtype, (sizes, strides, offset) in self.own:
            results[index] = _view_of(args[arg], dtype, sizes, strides, offset)
        for index, value in self.others:
            results[index] = value.clone()
        if self._views_of_inputs is not None:
            make, indices = self._views_of_inputs
            for index, view in zip(indices, make(*args), strict=True):
                results[index] = view
        return tuple(results)


def _view_of(
    tensor: torch.Tensor, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> torch.Tensor:
    """The memory `offset` bytes past the start of `tensor`, which need not lie inside of it."""
    start = tensor.storage_offset() * tensor.element_size() + offset
    if dtype is tensor.dtype:
        return tensor.detach().as_strided(sizes, strides, start // dtype.itemsize)
    empty = torch.empty(0, dtype=dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start // dtype.itemsize, sizes, strides)


def _views_of_inputs(gm: fx.GraphModule, indices: Sequence[int]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The part of a graph that makes views of its inputs, to be run on the caller's own tensors."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    needed = _ancestors([output.args[0][i] for i in indices])
    for node in gm.graph.nodes:
        if node.op == "placeholder" or node in needed:
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    graph.output(tuple(mapping[output.args[0][i]] for i in indices))
    return fx.GraphModule(gm, graph).forward


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found
