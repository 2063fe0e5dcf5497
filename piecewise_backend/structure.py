"""The structure of a piece as text: equal text, equal code, whatever the piece's place, names or symbols.

Everything that decides what a compiler makes of a graph is in it (operators, constants, dtypes, shapes, strides, how
inputs share memory, ranges of shape symbols); nothing else is (names, indices, hints, weights).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from piecewise_backend.breakpoints import target_names


def structure_text(gm: fx.GraphModule) -> str:
    """A canonical listing of `gm`, one line a node."""
    return "\n".join(_Listing(gm).lines())


class _Listing:
    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.names: dict[fx.Node, str] = {}
        self.symbols: dict[Any, str] = {}
        self.storages: dict[int, int] = {}

    def lines(self) -> Iterable[str]:
        for index, node in enumerate(self.gm.graph.nodes):
            self.names[node] = f"%{index}"
            yield f"%{index} = {self._line(node)}"
        for symbol, name in self.symbols.items():
            yield f"{name} in {_symbol_range(self.gm, symbol)}"

    def _line(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return f"input {self._value(node.meta.get('example_value'))}"
        if node.op == "get_attr":
            return f"constant {self._constant(_attribute(self.gm, str(node.target)))}"
        if node.op in ("call_function", "call_method"):
            target = node.target if node.op == "call_function" else f"method {node.target}"
            name = target if isinstance(target, str) else (target_names(target) or (repr(target),))[0]
            kwargs = _name_triton_kernel(node.kwargs) if "triton_kernel_wrapper" in name else node.kwargs
            return f"{name}({self._argument(node.args)}, {self._argument(kwargs)})"
        return f"{node.op} {node.target} {self._argument(node.args)} {self._argument(node.kwargs)}"

    def _argument(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return self.names[argument]
        if isinstance(argument, dict):
            return "{" + ", ".join(f"{k}: {self._argument(v)}" for k, v in sorted(argument.items(), key=str)) + "}"
        if isinstance(argument, tuple | list):
            return type(argument).__name__ + "(" + ", ".join(map(self._argument, argument)) + ")"
        if isinstance(argument, slice):
            return f"slice({', '.join(map(self._argument, (argument.start, argument.stop, argument.step)))})"
        return f"{type(argument).__name__}:{argument!r}"

    def _value(self, value: Any) -> str:
        if isinstance(value, torch.SymInt):
            return f"int {self._number(value)}"
        if not isinstance(value, torch.Tensor):
            return self._argument(value)
        described = f"{type(value).__name__} {value.dtype} {value.device.type} {tuple(map(self._number, value.shape))}"
        if value.layout is not torch.strided:
            return f"{described} {value.layout}"
        storage = self.storages.setdefault(value.untyped_storage()._cdata, len(self.storages))
        return f"{described} {tuple(map(self._number, value.stride()))} @{storage}+{self._number(value.storage_offset())}"

    def _number(self, number: Any) -> str:
        if not isinstance(number, torch.SymInt):
            return str(number)
        expression = number.node.expr
        for symbol in sorted(expression.free_symbols, key=lambda s: (len(str(s)), str(s))):
            self.symbols.setdefault(symbol, f"S{len(self.symbols)}")
        return str(expression.xreplace({s: type(s)(self.symbols[s], integer=True) for s in expression.free_symbols}))

    def _constant(self, value: Any) -> str:
        if isinstance(value, fx.GraphModule):
            return "graph [" + structure_text(value).replace("\n", "; ") + "]"
        if isinstance(value, torch.Tensor):
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return f"tensor {value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
        return repr(value)


def _name_triton_kernel(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A user's Triton kernel is a number in a table of this process: its source stands for it."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel = kernel_side_table.get_kernel(kwargs["kernel_idx"])
    source = getattr(kernel, "src", None) or getattr(getattr(kernel, "fn", None), "src", repr(kernel))
    constants = kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
    return {**kwargs, "kernel_idx": source, "constant_args_idx": repr(constants)}


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    found: Any = gm
    for part in target.split("."):
        found = getattr(found, part)
    return found


def _symbol_range(gm: fx.GraphModule, symbol: Any) -> str:
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            return str(value.node.shape_env.var_to_range.get(symbol))
    return "unknown"
