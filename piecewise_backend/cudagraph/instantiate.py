"""CUDA graphs made ready to be launched while others are recorded."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable

import torch


class Instantiator:
    """A thread that instantiates recorded graphs: the driver's work for a long one takes milliseconds, in which the
    next can be recorded. `add` graphs, `wait` until they can be replayed, and `close` in the end.

    device: index of the CUDA device. Graphs must have been made with `keep_graph=True`.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._graphs: queue.SimpleQueue[torch.cuda.CUDAGraph | threading.Event | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="mrv2 graphs", daemon=True)
        self._thread.start()

    def add(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graphs.put(graph)

    def wait(self) -> None:
        """Return when all are ready; raises what the first one raised that is not."""
        ready = threading.Event()
        self._graphs.put(ready)
        ready.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread, after what it has to do."""
        self._graphs.put(None)
        self._thread.join()

    def _work(self) -> None:
        self._note_error(functools.partial(torch.cuda.set_device, self._device))
        while (item := self._graphs.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._note_error(item.instantiate)

    def _note_error(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._error = self._error or error
