"""What is done to a piece on a GPU before Inductor gets it: operators that another form of serves better.

before: y = linear(x, w, b)                            after: y = mrv2.linear(x, w, b)
        mrv2.write_kv_cache(k, v, kv_cache, slots)            kv_cache[slots // n, [0, 1], slots % n] = [k, v]

Inductor leaves products to a library whose kernels are slow for a few rows. And it cannot see into the operators that
write caches; as tensor operations they are fused with what makes keys and values. Only `aten` operators are put into a
piece: PyTorch keeps nothing on disk that calls a function it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from attention.kernels.ahead import Launch, without_memory
from piecewise_backend.breakpoints import target_names

LOWERINGS = "cache writes fused 2, linear 1"
"""Part of every artifact's key. To be changed with what is done here."""

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten


def lowered_for_gpu(module: fx.GraphModule, compiler_options: Mapping[str, Any]) -> fx.GraphModule:
    """A copy with better forms of its operators, or `module` itself where it does not run on a GPU.

    Products stay Inductor's own where `compiler_options` have it choose among kernels, and in autocast regions, whose
    dtypes are decided as they run.
    """
    examples = [n.meta.get("example_value") for n in module.graph.nodes if n.op == "placeholder"]
    if not any(isinstance(e, torch.Tensor) and e.device.type == "cuda" for e in examples):
        return module
    tunes = compiler_options.get("max_autotune") or compiler_options.get("max_autotune_gemm")
    casts = any("autocast" in str(n.target) for n in module.graph.nodes)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        names = target_names(node.target) if node.op == "call_function" else ()
        if any(name in _CACHE_WRITES for name in names):
            write = next(_CACHE_WRITES[name] for name in names if name in _CACHE_WRITES)
            with graph.inserting_before(node):
                write(graph, *node.args)
            graph.erase_node(node)
        elif "aten::linear" in names and not (tunes or casts) and _is_half_linear(node):
            node.target, node.args = torch.ops.mrv2.linear.default, (*node.args, *(None,) * (3 - len(node.args)))
    return fx.GraphModule(module, graph)


def launches_ahead(module: fx.GraphModule) -> list[Launch]:
    """Launches, not to be run, of every kernel of ours that a piece lowered for a GPU needs."""
    products: dict[Any, list[Any]] = {}
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.mrv2.linear.default:
            weight, bias = (None if a is None else a.meta["example_value"] for a in node.args[1:])
            products[weight.shape, weight.dtype, bias is None] = [weight, bias]  # type: ignore[union-attr]
    if not products:
        return []
    from attention.kernels import linear  # needs Triton

    launches: list[Launch] = []
    for given in products.values():
        weight, bias = (None if tensor is None else without_memory(tensor) for tensor in given)
        assert weight is not None
        launches += linear.launches_ahead(weight, bias, given[0].device)
    return launches


def _is_half_linear(node: fx.Node) -> bool:
    """Whether all operands are matrices of one half-precision dtype, given by position."""
    operands: list[Any] = [a.meta.get("example_value") for a in node.args if isinstance(a, fx.Node)]
    dtypes = {getattr(operand, "dtype", None) for operand in operands}
    return not node.kwargs and len(dtypes) == 1 and dtypes <= set(_HALF) and operands[1].dim() == 2


# The operators decide row by row that a padded token, of slot -1, writes nothing. Here such a row writes to the last
# entry of the last block, -1 counted from the end: caches have one block more than is handed out.


def _write_kv_cache(graph: fx.Graph, key: fx.Node, value: fx.Node, kv_cache: fx.Node, slots: fx.Node) -> None:
    """As `attention.ops.write_kv_cache`, keys and values at once."""
    cache = kv_cache.meta["example_value"]
    block, offset = _place(graph, key, slots, cache.shape[2])
    both = graph.call_function(_aten.stack.default, ([key, value],))
    which = graph.call_function(_aten.arange.default, (2,), {"device": cache.device})
    which = graph.call_function(_aten.unsqueeze.default, (which, 1))
    block, offset = (graph.call_function(_aten.unsqueeze.default, (place, 0)) for place in (block, offset))
    _put(graph, kv_cache, [block, which, offset], both, cache.dtype)


def _write_cache(graph: fx.Graph, value: fx.Node, cache: fx.Node, slots: fx.Node) -> None:
    """As `attention.ops.write_cache`."""
    example = cache.meta["example_value"]
    _put(graph, cache, list(_place(graph, value, slots, example.shape[1])), value, example.dtype)


def _place(graph: fx.Graph, rows: fx.Node, slots: fx.Node, block_size: int) -> tuple[fx.Node, fx.Node]:
    """(block, offset in it) of the slot of each row; (-1, -1) counted from the end for slot -1."""
    count = graph.call_function(_aten.sym_size.int, (rows, 0))
    slots = graph.call_function(_aten.slice.Tensor, (slots, 0, 0, count))
    block = graph.call_function(_aten.floor_divide.default, (slots, block_size))
    return block, graph.call_function(_aten.remainder.Scalar, (slots, block_size))


def _put(graph: fx.Graph, cache: fx.Node, where: list[fx.Node], rows: fx.Node, dtype: torch.dtype) -> None:
    rows = graph.call_function(_aten.to.dtype, (rows, dtype))
    graph.call_function(_aten.index_put_.default, (cache, where, rows))


_CACHE_WRITES: dict[str, Callable[..., None]] = {
    "mrv2::write_kv_cache": _write_kv_cache,
    "mrv2::write_cache": _write_cache,
}
