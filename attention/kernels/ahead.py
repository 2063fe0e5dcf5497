"""Kernels compiled before they are needed, by threads, while the host does something else.

A Triton kernel is compiled at its first launch, which then takes half a second instead of microseconds. Compilation
leaves Python alone for most of that time, so a start can do it beside its own work, and no later step has to.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from attention.kernels.worker import Job, compile_here, workers

logger = logging.getLogger(__name__)

_MOST_THREADS = 8
_PATIENCE = 60.0
"""Seconds without news of a worker after which this process does what is left."""

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


def import_for_first_launch() -> None:
    """Import what Triton imports when its first kernel is launched, where it has it: 0.15 s of Python."""
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.experimental.gluon")


class KernelsAhead:
    """Compiles the kernels of launches without launching them: `compile` any number of times, then `wait`.

    in_workers: by Inductor's processes, where they are up; else, and where one fails, by threads of this process.
    """

    def __init__(self, *, in_workers: bool = False) -> None:
        self._in_workers = in_workers
        self._news: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """For the thread: what to do next; None when nothing more will come."""
        self._outside: list[Launch] = []
        """What workers are compiling."""
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
        for launch in launches:
            self._news.put(functools.partial(self._begin, launch))

    def wait(self) -> None:
        """Return when all are compiled. One that failed is logged: its launch will fail in the same way, and say so to
        whom it concerns."""
        if self._thread is not None:
            self._news.put(None)
            self._thread.join()
            self._thread = None

    def _work(self, here: torch.cuda.device) -> None:
        from triton import AsyncCompileMode

        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        with here, ThreadPoolExecutor(threads, "mrv2 kernels") as pool:
            with AsyncCompileMode(pool, ignore_errors=True) as mode:
                self._work_until_told()
            _log_failures(mode.raw_futures)

    def _work_until_told(self) -> None:
        more_to_come = True
        while more_to_come or self._outside:
            try:
                do = self._news.get(timeout=None if more_to_come else _PATIENCE)
            except queue.Empty:
                logger.warning("no word from Inductor's processes for %d s: compiling in this one", _PATIENCE)
                for launch in self._outside[:]:
                    self._take(launch)
                continue
            if do is None:
                more_to_come = False
            else:
                do()

    def _begin(self, launch: Launch) -> None:
        if self._in_workers and (pool := workers()) is not None:
            kernel, _, arguments, constants = launch
            try:
                future = pool.submit(compile_here, Job.of(kernel, _without_tensors(arguments), constants))
            except Exception:
                logger.debug("not for another process", exc_info=True)
            else:
                self._outside.append(launch)
                future.add_done_callback(lambda _: self._news.put(functools.partial(self._take, launch)))
                return
        _compile(launch)

    def _take(self, launch: Launch) -> None:
        """A worker is through: what it left on disk is read. If it failed there is nothing, and this compiles."""
        if any(launch is other for other in self._outside):
            self._outside = [other for other in self._outside if other is not launch]
            _compile(launch)


def _compile(launch: Launch) -> None:
    kernel, grid, arguments, constants = launch
    try:
        kernel.warmup(*_without_tensors(arguments), grid=grid, **constants)
    except Exception:
        logger.warning("a kernel could not be compiled ahead of its launch", exc_info=True)


def _without_tensors(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in arguments)


def _log_failures(futures: Sequence[Future[Any]]) -> None:
    for future in futures:
        if (error := future.exception()) is not None:
            logger.warning("a kernel could not be compiled ahead of its launch", exc_info=error)
