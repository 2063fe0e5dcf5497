"""Regions of a graph: settings that Dynamo switches on and off by calls, and that hold for the nodes between.

A region may span several segments. Each segment then enters it before its first node inside and leaves it after its
last one:

    before: a = enter_autocast(); h = mm(x, w); attention(h, out); z = mm(out, w); exit_autocast(a)
    after:  piece 0: [enter, mm, exit]   breakpoint 1: [enter, attention, exit]   piece 2: [enter, mm, exit]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention
from torch import fx

from piecewise_backend.breakpoints import target_names

_ENTER_AUTOCAST = torch.amp.autocast_mode._enter_autocast
_EXIT_AUTOCAST = torch.amp.autocast_mode._exit_autocast
# Everything runs without grad, so these mean nothing and must not straddle a boundary.
_GRAD_MODES = (
    torch._C._set_grad_enabled,
    torch.autograd.grad_mode._enter_inference_mode,
    torch.autograd.grad_mode._exit_inference_mode,
)
_SDPA = "aten::scaled_dot_product_attention"


def enter_sdpa_kernel(*args: Any) -> Any:
    """Choose the kernels of `scaled_dot_product_attention`; returns what to give `exit_sdpa_kernel`."""
    before = torch.nn.attention._cur_sdpa_kernel_backends(True)
    torch.nn.attention._sdpa_kernel(*args)
    return before


def exit_sdpa_kernel(before: Any) -> None:
    """Choose the kernels that were chosen before."""
    torch.nn.attention._sdpa_kernel(before, True)


def enter_deterministic(mode: bool, *, warn_only: bool = False) -> Any:
    """Switch deterministic algorithms; returns what to give `exit_deterministic`."""
    before = _deterministic()
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)
    return before


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def exit_deterministic(before: Any) -> None:
    """Switch back."""
    torch._C._set_deterministic_algorithms(before[0], warn_only=before[1])


@dataclass(frozen=True, slots=True)
class _Setting:
    """A state of the process that a call sets, without a token that would undo it."""

    enter: Callable[..., Any]
    exit: Callable[[Any], None]
    only: str | None = None
    """The one operator that it matters to, if it is one."""


_SETTINGS: dict[Any, _Setting] = {
    torch.nn.attention._sdpa_kernel: _Setting(enter_sdpa_kernel, exit_sdpa_kernel, _SDPA),
    torch._C._set_deterministic_algorithms: _Setting(enter_deterministic, exit_deterministic),
}


@dataclass(frozen=True, slots=True)
class Regions:
    """The regions of one graph; a region is named by the node that enters it."""

    around: dict[fx.Node, tuple[fx.Node, ...]]
    """The regions that hold for each other node, outermost first; absent for none."""
    marks: frozenset[fx.Node]
    """The nodes that do nothing but switch."""


def find_regions(graph: fx.Graph) -> Regions:
    """Read the regions off `graph`."""
    stack: list[fx.Node] = []
    marks: set[fx.Node] = set()
    around: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in graph.nodes:
        target = node.target if node.op == "call_function" else None
        if target in _GRAD_MODES:
            marks.add(node)
        elif target is _ENTER_AUTOCAST:
            marks.add(node)
            stack.append(node)
        elif target is _EXIT_AUTOCAST:
            marks.add(node)
            stack = [region for region in stack if region is not node.args[0]]
        elif target in _SETTINGS:
            marks.add(node)
            stack = [region for region in stack if region.target is not target]
            if not _is_ambient(node):
                stack.append(node)
        elif stack:
            around[node] = tuple(region for region in stack if _matters(region, node))
    for node in reversed(graph.nodes):  # what only computes the arguments of a switch
        if node.op == "call_function" and node.users and node not in marks and marks.issuperset(node.users):
            marks.add(node)
    return Regions(around, frozenset(marks))


def _matters(region: fx.Node, node: fx.Node) -> bool:
    only = _SETTINGS[region.target].only if region.target in _SETTINGS else None
    return only is None or only in target_names(node.target) or isinstance(node.target, torch._ops.HigherOrderOperator)


def _is_ambient(node: fx.Node) -> bool:
    """Whether the call would set what is set already: how Dynamo ends a `with`."""
    setting = _SETTINGS[node.target]
    arguments = fx.map_arg((node.args, node.kwargs), _evaluate)
    before = setting.enter(*arguments[0], **arguments[1])
    now = setting.enter(*arguments[0], **arguments[1])
    setting.exit(before)
    return bool(before == now)


def _evaluate(node: fx.Node) -> Any:
    """The value of a node that depends on constants alone."""
    assert callable(node.target), f"{node.name} switches a setting by a value that is not a constant"
    return node.target(*fx.map_arg(node.args, _evaluate), **fx.map_arg(node.kwargs, _evaluate))


class RegionWriter:
    """Writes the switches between the nodes of a new graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._open: list[tuple[fx.Node, fx.Node]] = []  # the region and its token in the new graph

    def move_to(self, regions: tuple[fx.Node, ...]) -> None:
        """Leave what `regions` lacks and enter the rest; () leaves all."""
        common = 0
        while common < min(len(self._open), len(regions)) and self._open[common][0] is regions[common]:
            common += 1
        while len(self._open) > common:
            region, token = self._open.pop()
            leave = _SETTINGS[region.target].exit if region.target in _SETTINGS else _EXIT_AUTOCAST
            self._graph.call_function(leave, (token,))
        for region in regions[common:]:
            enter = _SETTINGS[region.target].enter if region.target in _SETTINGS else _ENTER_AUTOCAST
            args, kwargs = fx.map_arg((region.args, region.kwargs), self._copy)
            self._open.append((region, self._graph.call_function(enter, args, kwargs)))

    def _copy(self, node: fx.Node) -> fx.Node:
        return self._graph.node_copy(node, self._copy)


class Switches:
    """For who runs nodes of a graph one by one, in order, but not all of them: runs those that switch."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._values: dict[fx.Node, Any] = {}
        self._autocasts: list[Any] = []

    def run(self, node: fx.Node) -> bool:
        """Whether `node` does nothing but switch; if so, it has been run, but for a switch of grad, which has no
        meaning here."""
        if node not in self._regions.marks:
            return False
        if node.target not in _GRAD_MODES:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
            self._values[node] = value = node.target(*args, **kwargs)  # type: ignore[operator]
            if node.target is _ENTER_AUTOCAST:
                self._autocasts.append(value)
            elif node.target is _EXIT_AUTOCAST:
                self._autocasts.remove(args[0])
        return True

    def _value(self, node: fx.Node) -> Any:
        return self._values[node] if node in self._values else node.meta.get("example_value")

    def close(self) -> None:
        """Leave what is still open."""
        while self._autocasts:
            _EXIT_AUTOCAST(self._autocasts.pop())


@contextlib.contextmanager
def switches_of(graph: fx.Graph) -> Iterator[Switches]:
    """Switches of `graph`; whatever runs inside, the settings are afterwards what they were."""
    switches = Switches(find_regions(graph))
    with settings_kept(), contextlib.closing(switches):
        yield switches


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Whatever runs inside, the settings are afterwards what they were."""
    sdpa = torch.nn.attention._cur_sdpa_kernel_backends(True)
    deterministic = _deterministic()
    try:
        yield
    finally:
        exit_sdpa_kernel(sdpa)
        exit_deterministic(deterministic)
