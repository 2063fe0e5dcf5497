"""Launches prepared once and repeated: what attention between recorded graphs costs the host.

A launch through Triton's JIT function looks at every argument anew to find its compiled kernel; for tensors and a plan
that are the same in every step, kernel and arguments are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attention.kernels.ahead import Launch

_MOST_PREPARED = 64
"""Plans remembered: one for each padded size, and a few lengths."""


class BoundLaunches:
    """Calls `plan_launches(metadata)` for the launches of a step, and repeats them while nothing in them has changed.

    The metadata has a `plan`, which is the same object for the same launches, and tensors.
    """

    def __init__(self, plan_launches: Callable[[Any], list[Launch]], tensors: Callable[[Any], Sequence[torch.Tensor]]):
        self._plan_launches = plan_launches
        self._tensors = tensors
        self._prepared: dict[int, _Prepared] = {}

    def __call__(self, metadata: Any) -> None:
        prepared = self._prepared.get(id(metadata.plan))
        if prepared is not None and prepared.fits(metadata.plan, self._tensors(metadata)):
            for launch, arguments in prepared.calls:
                launch(*arguments)
            return
        if len(self._prepared) >= _MOST_PREPARED:
            self._prepared.clear()
        calls = [_run(*launch) for launch in self._plan_launches(metadata)]
        if None not in calls:
            self._prepared[id(metadata.plan)] = _Prepared(metadata.plan, self._tensors(metadata), calls)


class _Prepared:
    """Launches of one plan on some tensors, both kept alive."""

    def __init__(self, plan: Any, tensors: Sequence[torch.Tensor], calls: list[Any]) -> None:
        self.plan = plan
        self.tensors = tuple(tensors)
        self.calls = calls

    def fits(self, plan: Any, tensors: Sequence[torch.Tensor]) -> bool:
        return plan is self.plan and all(a is b for a, b in zip(tensors, self.tensors, strict=True))


def _run(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Launch; returns how to do so again, None in Triton's interpreter. Tensors become addresses."""
    compiled = kernel[grid](*arguments, **constants)
    if compiled is None:
        return None
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
    again = tuple(_address(given[name]) for name in kernel.arg_names)
    return compiled[grid], again


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value
