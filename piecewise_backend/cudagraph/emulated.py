"""Graphs without a GPU: the operators of a recording, repeated at the addresses they were recorded at.

What a CUDA graph gets wrong silently, this recorder gets wrong loudly: a new input tensor is not seen, a stale value
stays stale, and memory that a real pool could have handed to another graph is filled with rubbish (NaN as floats, -1
as ints) before that other graph runs. What a CUDA graph refuses, it refuses by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from piecewise_backend.cudagraph.checks import (
    CaptureRefused,
    launches_work,
    why_uncapturable,
    written_arguments,
)


@dataclass(slots=True, eq=False)
class _Block:
    """One storage of the pool. `own` counts the recorder's references, which do not keep it from being reused."""

    storage: torch.UntypedStorage
    own: int = 1  # the reference of `storage` itself
    poisoned: bool = False

    def is_free(self) -> bool:
        return torch._C._storage_Use_Count(self.storage._cdata) <= self.own

    def poison(self) -> None:
        self.storage.fill_(0xFF)
        self.poisoned = True


@dataclass(slots=True, eq=False)
class EmulatedGraph:
    """One recording: calls in order, and the blocks it makes valid or may destroy."""

    calls: list[Callable[[], None]] = field(default_factory=list)
    made: list[_Block] = field(default_factory=list)
    reusable: list[_Block] = field(default_factory=list)

    def replay(self) -> None:
        for block in self.reusable:
            if not block.poisoned:
                block.poison()
        for call in self.calls:
            call()
        for block in self.made:
            block.poisoned = False


class EmulatedRecorder:
    """Records on any device; `poison=False` leaves reusable memory as it is."""

    name = "emulated"
    executes = True

    def __init__(self, *, poison: bool = True) -> None:
        self._poison = poison
        self._blocks: dict[int, _Block] = {}
        self._graph: EmulatedGraph | None = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        assert self._graph is None, "a graph is already being recorded"
        self._graph = EmulatedGraph()
        if self._poison:
            self._graph.reusable = [block for block in self._blocks.values() if block.is_free()]
            for block in self._graph.reusable:
                if not block.poisoned:
                    block.poison()

    def end(self) -> EmulatedGraph:
        graph, self._graph = self._graph, None
        assert graph is not None, "no graph is being recorded"
        return graph

    def abort(self) -> None:
        self._graph = None

    def call(self, run: Callable[..., Any], args: Sequence[Any], *, opaque: bool) -> Any:
        assert self._graph is not None, "no graph is being recorded"
        if not opaque:
            with _RecordingMode(self):
                return run(*args)
        results = run(*args)
        self.record(run, args, {}, results, always=True)
        return results

    def record(self, func: Callable[..., Any], args: Any, kwargs: Any, results: Any, *, always: bool) -> None:
        """Keep one call that has just been carried out, with aliases of its tensors in place of the tensors.

        `always`: repeat it even if it makes no new tensor, since it writes into its arguments.
        """
        graph = self._graph
        assert graph is not None
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        fresh = [t.untyped_storage()._cdata not in given for t in _tensors(results)]
        if not any(fresh) and not always:
            return
        for tensor, is_fresh in zip(_tensors(results), fresh, strict=True):
            if is_fresh:
                self._own_block(tensor, graph)
        keep_args, keep_kwargs, kept = (tree_map(self._alias, value) for value in (args, kwargs, results))
        outputs = [t for t, is_fresh in zip(_tensors(kept), fresh, strict=True) if is_fresh]
        if not outputs:
            graph.calls.append(lambda: func(*keep_args, **keep_kwargs))
            return

        def again() -> None:
            new = _tensors(func(*keep_args, **keep_kwargs))
            for output, value, is_fresh in zip(_tensors(kept), new, fresh, strict=True):
                if is_fresh:
                    output.copy_(value)

        graph.calls.append(again)

    def record_allocation(self, results: Any) -> None:
        """Memory that nothing has written yet is rubbish at every replay."""
        graph = self._graph
        assert graph is not None
        for tensor in _tensors(results):
            block = self._own_block(tensor, graph)
            if self._poison:
                block.poison()
                graph.calls.append(block.poison)

    def weaken(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._alias(tensor)

    def memory_bytes(self) -> int:
        return sum(block.storage.nbytes() for block in self._blocks.values())

    def _own_block(self, tensor: torch.Tensor, graph: EmulatedGraph) -> _Block:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            block = self._blocks[storage._cdata] = _Block(storage)
        if block not in graph.made:
            graph.made.append(block)
        return block

    def _alias(self, value: Any) -> Any:
        """The pool's own alias of a pooled tensor; anything else as it is."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        block = self._blocks.get(value.untyped_storage()._cdata)
        if block is None:
            return value
        block.own += 1
        return value.detach()


class _RecordingMode(TorchDispatchMode):
    def __init__(self, recorder: EmulatedRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        why = why_uncapturable(func, args, kwargs)
        if why is not None:
            raise CaptureRefused(f"{func} cannot be recorded: {why}")
        results = func(*args, **kwargs)
        if not launches_work(func):
            if not func.is_view and _tensors(results):
                self.recorder.record_allocation(results)
            return results
        self.recorder.record(func, args, kwargs, results, always=bool(written_arguments(func, args, kwargs)))
        return results


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]

