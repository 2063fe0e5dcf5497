"""A piece as code to read: what was traced, and what Inductor made of it."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from piecewise_backend.compile import CompiledPiece, compiled_piece

_MOST_OBJECTS = 10_000
"""A compiled piece has about a hundred objects around its code."""


def readable_code(module: fx.GraphModule) -> str:
    """Python of a piece, a module that can be imported: dtype, shape, strides and device of each value as annotations,
    the user's lines as comments where they are known.

        # File: model.py:6 in forward, code: y = gelu(x @ w)
        y: "f32[s77, 8][8, 1]cpu" = torch._C._nn.gelu(matmul);  matmul = None
    """
    code = module.print_readable(print_output=False, include_stride=True, include_device=True)
    return "\n".join([*import_lines(module), "", "", code.replace("class <lambda>", "class GraphModule").strip(), ""])


def import_lines(module: fx.GraphModule) -> list[str]:
    """Statements that define the names that the code of `module` reads.

    An object that no import reaches (a function made inside of another) is named in a comment.
    """
    lines = ["import torch", "from torch import device", "from math import inf, nan", "NoneType = type(None)"]
    names: dict[str, Any] = {}
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            names |= part.graph.python_code("self").globals
    for name, value in names.items():
        if name not in ("torch", "device", "inf", "nan", "NoneType"):
            lines.append(_import_line(name, value))
    return lines


def _import_line(name: str, value: Any) -> str:
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module is None or not path or "<" in path:
        return f"# {name}: {' '.join(repr(value).split())}, which no import reaches"
    outer, *inner = path.split(".")
    if not inner:
        return f"from {module} import {outer} as {name}" if name != outer else f"from {module} import {outer}"
    return f"import {module}\n{name} = {module}.{path}"


def generated_code(key: str) -> str | None:
    """Inductor's output for the piece of this `CompiledPiece.key`: a Python module with the wrapper and the sources of
    its Triton or C++ kernels.

    None for a key that no piece alive in this process has, and for a piece that Inductor did not make.
    """
    piece = compiled_piece(key)
    return None if piece is None else generated_code_of(piece)


def generated_code_of(piece: CompiledPiece) -> str | None:
    """The same for a piece at hand; None for one that Inductor did not make."""
    if not piece.opaque:
        return None
    codes = [o.source_code for o in _reached_from(piece.run) if isinstance(getattr(o, "source_code", None), str)]
    return codes[0] if codes else None


def _reached_from(root: Callable[..., Any]) -> Iterator[Any]:
    """What a callable is made of, nearest first: what it wraps and closes over, never globals.

    A fresh piece and one read from disk both end in torch's `CompiledFxGraph`, which keeps the source, but are wrapped
    in different functions, and each version of torch has its own.
    """
    seen: set[int] = set()
    todo: deque[Any] = deque([root])
    while todo and len(seen) < _MOST_OBJECTS:
        value = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        todo.extend(_parts_of(value))


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or () if not _is_empty(c)]
        return [*cells, *value.__dict__.values()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args]
    if callable(value) and not isinstance(value, type):
        return list(getattr(value, "__dict__", {}).values())
    return []


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
