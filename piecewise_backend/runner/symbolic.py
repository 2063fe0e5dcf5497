"""Traced values as plain data: sizes as expressions over numbered symbols, tensors by their layout.

a tensor of int64 [s0, 4 * s0]  ->  ["tensor", "int64", "cpu", [["s", 0], ["Mul", 4, ["s", 0]]], [...], 0]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.utils._sympy.functions as torch_functions
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

_FUNCTIONS: dict[str, Any] = {
    name: getattr(module, name)
    for module, names in (
        (sympy, ("Add", "Mul", "Pow")),
        (torch_functions, ("FloorDiv", "CleanDiv", "CeilDiv", "ModularIndexing", "Mod", "PythonMod", "Max", "Min")),
    )
    for name in names
    if hasattr(module, name)
}


class NotPlain(Exception):
    """A value that has no form as plain data; the message says which."""


class ValueWriter:
    """Writes traced values; equal ones are written once."""

    def __init__(self) -> None:
        self.symbols: dict[Any, int] = {}
        self.hints: list[int] = []
        self.rows: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, value: Any) -> int:
        """The place of `value` among `rows`. NotPlain for what is no number, text or strided tensor."""
        row = self._row(value)
        key = repr(row)
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(row)
        return self._numbers[key]

    def _row(self, value: Any) -> list[Any]:
        if value is None or type(value) in (bool, int, float, str):
            return ["plain", value]
        if isinstance(value, torch.SymInt):
            return ["size", self._size(value)]
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            sizes = [self._size(n) for n in value.shape]
            strides = [self._size(n) for n in value.stride()]
            dtype = str(value.dtype).removeprefix("torch.")
            return ["tensor", dtype, str(value.device), sizes, strides, self._size(value.storage_offset())]
        raise NotPlain(f"a value that is a {type(value).__name__}")

    def _size(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return int(size)
        return self._expression(size.node.expr, size.node.shape_env)

    def _expression(self, expression: Any, shape_env: Any) -> Any:
        if isinstance(expression, sympy.Integer):
            return int(expression)
        if isinstance(expression, sympy.Symbol):
            if expression not in self.symbols:
                self.symbols[expression] = len(self.symbols)
                self.hints.append(_hint(expression, shape_env))
            return ["s", self.symbols[expression]]
        name = type(expression).__name__
        if _FUNCTIONS.get(name) is not type(expression):
            raise NotPlain(f"a size computed by {name}")
        return [name, *(self._expression(a, shape_env) for a in expression.args)]


class ValueReader:
    """Makes traced values anew, in a shape environment of their own."""

    def __init__(self, rows: Sequence[Any], hints: Sequence[int]) -> None:
        self.shape_env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shape_env)
        self.symbols = [self._new_symbol(i, int(hint)) for i, hint in enumerate(hints)]
        self.hints = dict(zip(self.symbols, map(int, hints), strict=True))
        self.values = [self._value(row) for row in rows]

    def _new_symbol(self, index: int, hint: int) -> Any:
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        example = torch.empty(hint, device="meta")
        fake = self.mode.from_tensor(example, source=ConstantSource(f"size_{index}"), symbolic_context=context)
        size = fake.shape[0]
        if not isinstance(size, torch.SymInt):
            raise NotPlain(f"a size of {hint}, which torch fixes")
        return size.node.expr

    def _value(self, row: Sequence[Any]) -> Any:
        kind, *rest = row
        if kind == "plain":
            return rest[0]
        if kind == "size":
            return self._size(rest[0])
        dtype, device, sizes, strides, offset = rest
        sizes, strides = [[self._size(n) for n in numbers] for numbers in (sizes, strides)]
        with torch.no_grad(), self.mode:
            tensor = torch.empty_strided(sizes, strides, dtype=_dtype(dtype), device=device)
            return tensor if offset == 0 else tensor.as_strided(sizes, strides, self._size(offset))

    def _size(self, size: Any) -> Any:
        expression = self._expression(size)
        if isinstance(expression, sympy.Integer):
            return int(expression)
        hint = int(expression.xreplace({s: sympy.Integer(n) for s, n in self.hints.items()}))
        return self.shape_env.create_symintnode(expression, hint=hint)

    def _expression(self, size: Any) -> Any:
        if isinstance(size, int):
            return sympy.Integer(size)
        name, *args = size
        return self.symbols[args[0]] if name == "s" else _FUNCTIONS[name](*map(self._expression, args))


def _hint(symbol: Any, shape_env: Any) -> int:
    """The size that was traced."""
    if hasattr(shape_env, "guarding_hint_or_throw"):  # torch 2.12 on; the older name warns there
        return int(shape_env.guarding_hint_or_throw(symbol))
    return int(shape_env.size_hint(symbol))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found
