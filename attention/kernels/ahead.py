"""Kernels compiled before they are needed, by threads, while the host does something else.

A Triton kernel is compiled at its first launch, which then takes half a second instead of microseconds. Compilation
leaves Python alone for most of that time, so a start can do it beside its own work, and no later step has to.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

logger = logging.getLogger(__name__)

_MOST_THREADS = 8

Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""JIT function, grid, positional arguments, constants."""


def without_memory(traced: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device, laid out as a traced one was at the sizes of its trace."""
    layout = (traced.shape, traced.stride())
    sizes, strides = ([_known(number) for number in numbers] for numbers in layout)
    return torch.empty_strided(sizes, strides, dtype=traced.dtype, device="meta")


def _known(number: int | torch.SymInt) -> int:
    """As traced; 1 for a number that only the device knows: no kernel is compiled for it."""
    if not isinstance(number, torch.SymInt):
        return number
    return number.node.hint if number.node.has_hint() else 1


class KernelsAhead:
    """Compiles the kernels of launches without launching them: `compile` any number of times, then `wait`."""

    def __init__(self) -> None:
        self._launches: queue.SimpleQueue[Sequence[Launch] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def compile(self, launches: Sequence[Launch]) -> None:
        """Begin to compile the kernels that `launches` need on the current GPU; those known already cost nothing.

        Of tensors only dtypes count: their memory is taken to be aligned to 16 bytes.
        """
        if not launches:
            return
        if self._thread is None:
            here = torch.cuda.device(torch.cuda.current_device() if torch.cuda.is_available() else -1)
            self._thread = threading.Thread(target=self._work, args=(here,), name="mrv2 kernels", daemon=True)
            self._thread.start()
        self._launches.put(launches)

    def wait(self) -> None:
        """Return when all are compiled. One that failed is logged: its launch will fail in the same way, and say so to
        whom it concerns."""
        if self._thread is not None:
            self._launches.put(None)
            self._thread.join()
            self._thread = None

    def _work(self, here: torch.cuda.device) -> None:
        from triton import AsyncCompileMode

        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        with here, ThreadPoolExecutor(threads, "mrv2 kernels") as pool:
            with AsyncCompileMode(pool, ignore_errors=True) as mode:
                while (launches := self._launches.get()) is not None:
                    for launch in launches:
                        _begin(*launch)
            _log_failures(mode.raw_futures)


def _begin(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    try:
        kernel.warmup(*(a.dtype if isinstance(a, torch.Tensor) else a for a in arguments), grid=grid, **constants)
    except Exception:
        logger.warning("a kernel could not be compiled ahead of its launch", exc_info=True)


def _log_failures(futures: Sequence[Future[Any]]) -> None:
    for future in futures:
        if (error := future.exception()) is not None:
            logger.warning("a kernel could not be compiled ahead of its launch", exc_info=error)
