"""A step that is wrong: which of its operators, and on which line of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from piecewise_backend.breakpoints import target_names
from piecewise_backend.cudagraph.capture import capture_session
from piecewise_backend.cudagraph.recorder import GraphRecorder
from piecewise_backend.program import Program, Traced
from piecewise_backend.source_lines import source_line
from piecewise_backend.verifying.compare import distance
from piecewise_backend.verifying.walks import copied

Place = tuple[str, str]
"""(operator, the user's line); empty where unknown."""


def producer(traced: Traced | None, position: int) -> Place:
    """What makes output `position` of a step, or writes to the input that comes after the outputs."""
    if traced is None:
        return "", ""
    calls = [n for n in traced.segment.module.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    (output,) = (n for n in traced.segment.module.graph.nodes if n.op == "output")
    if position < len(output.args[0]):
        return place_of(output.args[0][position])
    return place_of(calls[-1]) if calls else ("", "")


def place_of(node: fx.Node) -> Place:
    """Of one node."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return "", ""
    names = target_names(node.target)
    return (names[-1] if names else str(node.target)), source_line(node)


def random_line(traced: Traced) -> str:
    """ " (line)" of the first operator of a step that draws random numbers somewhere."""
    lines = [source_line(n) for n in traced.segment.module.graph.nodes if "stack_trace" in n.meta]
    return f" ({lines[0]})" if lines else ""


def suspects(program: Program, steps: Sequence[int]) -> list[Place]:
    """Operators among these steps that may hold on to an address or a number of the host: those not PyTorch's own."""
    found: dict[Place, None] = {}
    for index in steps:
        if index < len(program.traced):
            for node in program.traced[index].segment.module.graph.nodes:
                if node.op == "call_function" and _is_foreign(node.target):
                    found[place_of(node)] = None
    return list(found)


def _is_foreign(target: Any) -> bool:
    names = target_names(target)
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._library.custom_ops.CustomOpDef):
        return not names[-1].startswith(("aten::", "prims::", "mrv2::"))
    return isinstance(target, torch._ops.HigherOrderOperator) and "triton" in names[-1]


def first_wrong_when_replayed(traced: Traced, values: Sequence[Any], recorder: GraphRecorder) -> Place | None:
    """Record a step node by node on other values, replay it on `values`; the first node whose result is not that of a
    plain run. None where every node is right, or cannot be recorded by itself."""
    module = traced.segment.module
    expected = _Nodewise(module).results(*map(copied, values))
    static = [_altered(v) for v in values]
    with capture_session(recorder):
        recorder.begin()
        try:
            results = recorder.call(_Nodewise(module).results, static, opaque=False)
        except Exception:
            recorder.abort()
            raise
        graph = recorder.end()
    for tensor, value in zip(static, values, strict=True):
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(value)
    graph.replay()
    for node, one, other in zip(_computing(module), expected, results, strict=True):
        if distance(one, other) is not None:
            return place_of(node)
    return None


def _altered(value: Any) -> Any:
    """Other values of the same sort: integers may be indices and stay."""
    if not isinstance(value, torch.Tensor):
        return value
    return value * 0.5 + 0.25 if value.dtype.is_floating_point else value.clone()


def _computing(module: fx.GraphModule) -> list[fx.Node]:
    fakes = ((n, n.meta.get("example_value")) for n in module.graph.nodes)
    return [
        n for n, fake in fakes if isinstance(fake, torch.Tensor) and n.op not in ("placeholder", "output", "get_attr")
    ]


class _Nodewise(fx.Interpreter):
    """Runs a graph and keeps a copy of each result."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._kept: dict[fx.Node, torch.Tensor] = {}
        self._nodes = _computing(module)

    def results(self, *args: Any) -> list[Any]:
        self.run(*args)
        return [self._kept[node] for node in self._nodes]

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self._nodes:
            self._kept[n] = copied(result)
        return result
