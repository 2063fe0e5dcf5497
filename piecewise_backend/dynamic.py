"""What varies in a traced graph: marked dimensions must have stayed dynamic, and floats must not be symbols."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx


def check_marked_dims(gm: fx.GraphModule) -> None:
    """ValueError for a dimension under `torch._dynamo.mark_dynamic` that the model fixed, naming the line that did.

    Dynamo finds the same only after everything is compiled.
    """
    for node in gm.graph.nodes:
        fake = node.meta.get("example_value")
        if node.op != "placeholder" or not isinstance(fake, torch.Tensor) or "grapharg" not in node.meta:
            continue
        grapharg = node.meta["grapharg"]
        for dim in sorted(getattr(grapharg.example, "_dynamo_dynamic_indices", ())):
            size = fake.shape[dim]
            if isinstance(size, int) or not size.node.expr.free_symbols:
                shape_env = getattr(getattr(fake, "fake_mode", None), "shape_env", None)
                raise ValueError(
                    f"dimension {dim} of input {node.name!r} is marked dynamic, but the model fixes it at "
                    f"{size}{_where(shape_env, grapharg.source, dim)}. Make that line work for any size (cut "
                    "a buffer of fixed length to the size of the input; mark the other tensor of the same size too), "
                    "or do not mark the dimension"
                )


def specialize_floats(gm: fx.GraphModule) -> None:
    """Make Dynamo trace again with Python floats as constants, where it made symbols of them.

    A symbolic float is read on the host at every call; a graph has it baked in.
    """
    symbols = {str(s) for node in gm.graph.nodes for s in _float_symbols(node.meta.get("example_value"))}
    if symbols:
        from torch._dynamo.exc import TensorifyScalarRestartAnalysis
        from torch._dynamo.symbolic_convert import TensorifyState

        for symbol in symbols:
            TensorifyState.specialize(symbol)
        raise TensorifyScalarRestartAnalysis


def _float_symbols(value: Any) -> Iterator[Any]:
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    if isinstance(value, torch.SymFloat):
        yield from (s for s in value.node.expr.free_symbols if symbol_is_type(s, SymT.FLOAT))


def _where(shape_env: Any, source: Any, dim: int) -> str:
    """ ", in file:line, in function: code" of what fixed a dimension; "" where torch did not keep it."""
    for symbol, sources in getattr(shape_env, "var_to_sources", {}).items():
        for candidate in sources:
            if getattr(candidate, "base", None) == source and getattr(candidate, "idx", None) == dim:
                return _stack_line(shape_env, candidate) or _location(shape_env, symbol)
    return ""


def _stack_line(shape_env: Any, source: Any) -> str:
    stack = getattr(shape_env, "specialization_stacks", {}).get(source)
    summary: Any = stack.summary() if hasattr(stack, "summary") else stack  # type: ignore[union-attr]
    frames = [f for f in summary or () if "/torch/" not in f.filename and not f.filename.startswith("<")]
    if not frames:
        return ""
    return f", in {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line}"


def _location(shape_env: Any, symbol: Any) -> str:
    """From the guard that replaced the symbol by a number: its path is cut short, but has the line."""
    location = getattr(shape_env, "replacements_slocs", {}).get(symbol)
    line = getattr(location, "maybe_user_loc", None)
    return f", in {line}" if line else ""
