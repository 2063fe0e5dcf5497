"""Times of several contenders in one run: in rounds through all of them, so that a drift of the machine hits all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

_SLOT_SECONDS = 0.02


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def calls_per_slot(runs: Mapping[str, Callable[[], Any]], *, most: int = 100) -> int:
    """How often to call each in one slot, so that the slowest takes about 20 ms and a clock's tick does not count."""
    slowest = max((_milliseconds(run, 1) for run in runs.values()), default=1.0)
    return max(1, min(most, int(_SLOT_SECONDS * 1e3 / max(slowest, 1e-6))))


def time_interleaved(
    runs: Mapping[str, Callable[[], Any]], *, rounds: int, warmup: int, calls: int
) -> dict[str, dict[str, Any]]:
    """Milliseconds of one call of each: median and spread (10th to 90th percentile) over `rounds` slots of `calls`.

    Each round gives every contender one slot, in turns forwards and backwards; `warmup` rounds come before. The device
    is through at both ends of a slot.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for index in range(warmup + rounds):
        for name in names if index % 2 == 0 else reversed(names):
            ms = _milliseconds(runs[name], calls)
            if index >= warmup:
                times[name].append(ms)
    return {name: _summary(found) | {"calls_per_round": calls} for name, found in times.items()}


def _milliseconds(run: Callable[[], Any], calls: int) -> float:
    synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize()
    return (time.perf_counter() - started) / calls * 1e3


def _summary(times: list[float]) -> dict[str, Any]:
    tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else [times[0]] * 9
    return {"median_ms": statistics.median(times), "p10_ms": tenths[0], "p90_ms": tenths[-1], "rounds_ms": times}
