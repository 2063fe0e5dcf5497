"""Which memory values of a Python-level graph share, and whether a node writes to it: that is found by running it on
fake tensors, since its name and its arguments do not say (`relu(x, True)`, `add(x, y, out=z)`, a method of a view).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piecewise_backend.cudagraph.checks import written_arguments


def may_write(node: fx.Node, value: fx.Node) -> bool:
    """Whether `node` writes to the memory of tensor `value`, by whatever view of it; True where that cannot be found
    out. Both carry the examples that Dynamo gave them."""
    example = value.meta.get("example_value")
    inputs = [n.meta.get("example_value") for n in node.all_input_nodes]
    if node.op not in ("call_function", "call_method") or not share_memory(inputs, example):
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _detached(n.meta.get("example_value")))
    fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch._subclasses.FakeTensor)]
    watcher = _Watcher()
    try:
        with torch.no_grad(), enable_python_dispatcher(), fakes[0].fake_mode, watcher:
            if node.op == "call_method":
                getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # no operator that runs on examples alone
        return True
    return _memory(example) in watcher.written


def share_memory(value: Any, other: Any) -> bool:
    """Whether a tensor among the leaves of `value` has memory in common with one of `other`."""
    return not _memories(value).isdisjoint(_memories(other))


class _Watcher(TorchDispatchMode):
    """Notes the memory that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int | None] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.written.update(map(_memory, written_arguments(func, args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _memories(value: Any) -> set[int]:
    return {memory for leaf in tree_leaves(value) if (memory := _memory(leaf)) is not None}


def _memory(value: Any) -> int | None:
    """A number of the memory of a tensor; None for anything else."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def _detached(value: Any) -> Any:
    """The same memory with sizes of its own, which changing them in place leaves alone in the example."""
    return value.detach() if isinstance(value, torch.Tensor) else value
