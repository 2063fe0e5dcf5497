"""Which operator lets padded rows into real ones: the traced graph, run with and without padding, node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from piecewise_backend.cudagraph.rows import TokenDim, expanded_dims
from piecewise_backend.padding import close
from piecewise_backend.source_lines import source_line


def first_mixing_operator(gm: fx.GraphModule, dim: TokenDim, args: Sequence[Any], count: int) -> tuple[str, str] | None:
    """(operator, `source_line`) of the first node whose real rows change with padding; None where none is found.

    args: of a call with `count` rows; inputs are cloned. Floats are padded with NaN, other values with their last row.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    fakes = [n.meta.get("example_value") for n in placeholders]
    padded = [_padded(value, fake, dim, count) for value, fake in zip(args, fakes, strict=True)]
    plain = [v.clone() if isinstance(v, torch.Tensor) and dim.dims(f) else v for v, f in zip(args, fakes, strict=True)]
    with torch.no_grad():
        expected = _Values(gm).of(plain)
        found = _Values(gm).of(padded)
    for node, value in expected.items():
        fake = node.meta.get("example_value")
        if node.op in ("placeholder", "output") or not isinstance(value, torch.Tensor):
            continue
        if not close(value, dim.narrow(found[node], fake, count)):
            return str(getattr(node.target, "__name__", node.target)), source_line(node)
    return None


class _Values(fx.Interpreter):
    """Runs a graph and keeps a copy of each node's value: a later node may write to it."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def of(self, args: Sequence[Any]) -> dict[fx.Node, Any]:
        self.run(*args)
        return self.values

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n] = result.clone() if isinstance(result, torch.Tensor) else result
        return result


def _padded(value: Any, fake: Any, dim: TokenDim, count: int) -> Any:
    """One row more than `count`."""
    if isinstance(fake, torch.SymInt):
        return dim.evaluate(fake, count + 1)
    if not dim.dims(fake) or expanded_dims(value):
        return value
    result = dim.empty(fake, count + 1)
    real = dim.narrow(result, fake, count)
    rubbish = float("nan") if value.dtype.is_floating_point or value.dtype.is_complex else 0
    result.fill_(value.flatten()[-1] if rubbish == 0 and value.numel() else rubbish)
    real.copy_(value)
    return result
