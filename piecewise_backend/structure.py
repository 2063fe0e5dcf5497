"""The structure of a piece as text: equal text, equal code, whatever the piece's place, names or symbols.

Everything that decides what a compiler makes of a graph is in it (operators, constants, dtypes, shapes, strides, how
inputs share memory, what is known of shape symbols); nothing else is (names, indices, hints, weights).
"""

from __future__ import annotations

import contextlib
import hashlib
import types
import uuid
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from piecewise_backend.breakpoints import target_names

_LIBRARIES = ("torch", "piecewise_backend", "attention", "_operator", "operator", "math", "builtins")


def structure_text(gm: fx.GraphModule) -> str:
    """A canonical listing of `gm`, one line a node, and what is known of its sizes."""
    return "\n".join(_Listing(gm).lines())


def sizes_of(gm: fx.GraphModule) -> list[torch.SymInt]:
    """The symbolic sizes among the inputs of `gm`, in order."""
    values = (n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder")
    return [v for v in values if isinstance(v, torch.SymInt)]


def known_of_sizes(sizes: list[torch.SymInt]) -> str:
    """What a trace has established of `sizes` so far: a Python expression over L['t0'], L['t1'], ..."""
    if not sizes:
        return ""
    shape_env = sizes[0].node.shape_env
    guards = shape_env.get_pruned_guards(sizes)
    return shape_env.produce_guards_expression(placeholders=sizes, guards=guards) or ""


class _Listing:
    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.names: dict[fx.Node, str] = {}
        self.symbols: dict[Any, str] = {}
        self.ranges: dict[Any, str] = {}
        self.storages: dict[int, int] = {}

    def lines(self) -> Iterator[str]:
        for index, node in enumerate(self.gm.graph.nodes):
            self.names[node] = f"%{index}"
            yield f"%{index} = {self._line(node)}"
        for symbol, name in self.symbols.items():
            yield f"{name} in {self.ranges[symbol]}"
        yield f"given {known_of_sizes(sizes_of(self.gm))}"

    def _line(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return f"input {self._value(node.meta.get('example_value'))}"
        if node.op == "get_attr":
            return f"constant {self._constant(_attribute(self.gm, str(node.target)))}"
        if node.op == "call_module":  # its weights are part of it
            module = self.gm.get_submodule(str(node.target))
            return f"module {_identity(module)} {self._argument(node.args)} {self._argument(node.kwargs)}"
        kwargs: Mapping[str, Any] = node.kwargs
        name = f"method {node.target}" if node.op == "call_method" else _target_text(node.target)
        if "triton_kernel_wrapper" in name:
            kwargs = _name_triton_kernel(node.kwargs)
        return f"{node.op} {name}({self._argument(node.args)}, {self._argument(kwargs)})"

    def _argument(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return self.names[argument]
        if isinstance(argument, Mapping):
            return "{" + ", ".join(f"{k}: {self._argument(v)}" for k, v in sorted(argument.items(), key=str)) + "}"
        if isinstance(argument, tuple | list):
            return type(argument).__name__ + "(" + ", ".join(map(self._argument, argument)) + ")"
        if isinstance(argument, slice):
            return f"slice({', '.join(map(self._argument, (argument.start, argument.stop, argument.step)))})"
        return _plain_text(argument)

    def _value(self, value: Any) -> str:
        if isinstance(value, torch.SymInt):
            return f"int {self._number(value)}"
        if not isinstance(value, torch.Tensor):
            return self._argument(value)
        # The device has its index: compiled code launches on that very device.
        described = f"{type(value).__name__} {value.dtype} {value.device} {tuple(map(self._number, value.shape))}"
        if value.layout is not torch.strided:
            return f"{described} {value.layout}"
        flags = f"{value.is_conj()} {value.is_neg()} {value.is_inference()}"
        storage = self.storages.setdefault(value.untyped_storage()._cdata, len(self.storages))
        strides = tuple(map(self._number, value.stride()))
        return f"{described} {strides} @{storage}+{self._number(value.storage_offset())} {flags}"

    def _number(self, number: Any) -> str:
        if not isinstance(number, torch.SymInt):
            return str(number)
        expression = number.node.expr
        for symbol in sorted(expression.free_symbols, key=lambda s: (len(str(s)), str(s))):
            if symbol not in self.symbols:
                self.symbols[symbol] = f"S{len(self.symbols)}"
                self.ranges[symbol] = str(number.node.shape_env.var_to_range.get(symbol))
        return str(expression.xreplace({s: type(s)(self.symbols[s], integer=True) for s in expression.free_symbols}))

    def _constant(self, value: Any) -> str:
        if isinstance(value, fx.GraphModule):
            return "graph [" + structure_text(value).replace("\n", "; ") + "]"
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            layout = f"{tuple(value.shape)} {value.stride()}"
            return f"tensor {value.dtype} {value.device} {layout} {hashlib.sha256(data).hexdigest()}"
        return _plain_text(value)


def _target_text(target: Any) -> str:
    if isinstance(target, types.FunctionType) and target.__module__.partition(".")[0] not in _LIBRARIES:
        # A compiler may trace through it, and what it does is not in the graph.
        return f"{target.__module__}.{target.__qualname__} {_identity(target)}"
    names = target_names(target)
    if not names:
        return _plain_text(target)
    operator = target.default if hasattr(target, "default") and not names[0].startswith("aten::") else target
    schema = f" {operator._schema}" if isinstance(operator, torch._ops.OpOverload) else ""
    return names[0] + schema


def _plain_text(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__}:{_identity(value) if ' at 0x' in text or ' object at ' in text else text}"


_identities: dict[int, tuple[Any, str]] = {}


def _identity(value: Any) -> str:
    """A name for an object whose content cannot be told: the same in this process, never seen in another."""
    known = _identities.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    name = uuid.uuid4().hex
    with contextlib.suppress(TypeError):  # no weak reference: each look is another object
        key = id(value)
        _identities[key] = (weakref.ref(value, lambda _: _identities.pop(key, None)), name)
    return name


def _name_triton_kernel(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A user's Triton kernel is a number in a table of this process: its source stands for it."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel = kernel_side_table.get_kernel(kwargs["kernel_idx"])
    constants = kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
    return {**kwargs, "kernel_idx": _kernel_text(kernel), "constant_args_idx": constants}


def _kernel_text(kernel: Any) -> str:
    """Source, and the sources of what it calls; the configurations that an autotuner tries."""
    configs = getattr(kernel, "configs", ())
    while not hasattr(kernel, "src") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    try:
        source = kernel.cache_key
    except Exception:  # interpreted, or not parsed by this version
        source = getattr(kernel, "src", None) or _identity(kernel)
    return f"{source} {[str(c) for c in configs]}"


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    found: Any = gm
    for part in target.split("."):
        found = getattr(found, part)
    return found
