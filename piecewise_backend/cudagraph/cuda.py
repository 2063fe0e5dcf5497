"""Real CUDA graphs: one pool and one capture stream per recorder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from piecewise_backend.cudagraph.recorder import unowned


class CudaGraphRecorder:
    """Records what is launched on its stream. Nothing is carried out while recording: replay to do so."""

    name = "cuda"
    executes = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        self._first: torch.cuda.CUDAGraph | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._closed_bytes = 0
        self._free_at_start: int | None = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """All work in the session, eager work included, is on the capture stream."""
        outer = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outer)
        self._free_at_start = torch.cuda.mem_get_info(self.device)[0]
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                if self._pool is None:
                    self._open_pool()
                yield
        finally:
            outer.wait_stream(self._stream)
            self._closed_bytes, self._free_at_start = self.memory_bytes(), None

    def begin(self) -> None:
        assert self._graph is None, "a graph is already being recorded"
        if self._pool is None:
            self._open_pool()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile (a data loader's pinning thread): only this one must not synchronise.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def call(self, run: Callable[..., Any], args: Sequence[Any], *, opaque: bool) -> Any:
        return run(*args)

    def end(self) -> torch.cuda.CUDAGraph:
        graph = self._graph
        assert graph is not None, "no graph is being recorded"
        graph.capture_end()  # on an error the graph stays to be aborted
        self._graph = None
        return graph

    def abort(self) -> None:
        """Drop the graph being recorded, and leave allocator and random generator fit for use."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        try:
            graph.capture_end()
        except RuntimeError:  # the capture is invalid already, and torch stopped half-way through ending it
            self._repair()

    def weaken(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without a reference to it: graphs keep their pool alive as a whole."""
        recorded = isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda" and tensor.layout is torch.strided
        return unowned(tensor) if recorded else tensor

    def memory_bytes(self) -> int:
        """Device memory taken in recording sessions so far: the pool and what the driver keeps of each graph."""
        if self._free_at_start is None:
            return self._closed_bytes
        return self._closed_bytes + max(0, self._free_at_start - torch.cuda.mem_get_info(self.device)[0])

    def _open_pool(self) -> None:
        """A pool, held open by a first graph of its own.

        torch's allocators, of device and of pinned host memory, close a pool with its last graph, and fail an
        assertion when a graph is then recorded into it.
        """
        self._pool = torch.cuda.graph_pool_handle()
        something = torch.zeros(1, device=self.device)
        self._first = torch.cuda.CUDAGraph()
        self._first.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        something.add_(1)
        self._first.capture_end()

    def _repair(self) -> None:
        """Undo what a capture that ended in an error left behind, and go on in a new pool."""
        with contextlib.suppress(RuntimeError):  # it may have failed before the allocator was told of the pool
            torch._C._cuda_endAllocateToPool(self.device.index or 0, self._pool)
        # The generator still counts as capturing and would refuse every draw; a copy of its state does not.
        generator = torch.cuda.default_generators[self.device.index or 0]
        generator.graphsafe_set_state(generator.clone_state())
        self._pool = self._first = None
