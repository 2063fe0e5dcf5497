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
        # The pool outlives its graphs: capturing into one whose last graph is gone fails an assertion of the allocator.
        self._owner = torch.cuda.MemPool()
        self._pool: Any = self._owner.id
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_bytes = 0

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """All work in the session, eager work included, is on the capture stream."""
        outer = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outer)
        free_before = torch.cuda.mem_get_info(self.device)[0]
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outer.wait_stream(self._stream)
            self._graph_bytes += max(0, free_before - torch.cuda.mem_get_info(self.device)[0])

    def begin(self) -> None:
        assert self._graph is None, "a graph is already being recorded"
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile (a data loader's pinning thread): only this one must not synchronise.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def call(self, run: Callable[..., Any], args: Sequence[Any], *, opaque: bool) -> Any:
        return run(*args)

    def end(self) -> torch.cuda.CUDAGraph:
        graph, self._graph = self._graph, None
        assert graph is not None, "no graph is being recorded"
        graph.capture_end()
        return graph

    def abort(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):  # the capture is already invalid: that is why it is dropped
                graph.capture_end()

    def weaken(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without a reference to it: graphs keep their pool alive as a whole."""
        recorded = isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda" and tensor.layout is torch.strided
        return unowned(tensor) if recorded else tensor

    def memory_bytes(self) -> int:
        return self._graph_bytes
