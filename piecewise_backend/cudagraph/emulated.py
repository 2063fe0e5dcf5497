"""Graphs without a GPU: the operators of a recording, repeated at the addresses they were recorded at.

What a CUDA graph gets wrong silently, this recorder gets wrong loudly: a new input tensor is not seen, a stale value
stays stale, and memory that a real pool could have handed to another graph is filled with rubbish (NaN as floats, -1
as ints) before that other graph runs. What a CUDA graph refuses, it refuses by name.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from attention.forward_context import current_forward_context, set_forward_context
from piecewise_backend.cudagraph.checks import (
    CaptureRefused,
    is_composite,
    launches_work,
    why_uncapturable,
    written_arguments,
)
from piecewise_backend.cudagraph.recorder import unowned
from piecewise_backend.cudagraph.rows import copy_into


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Block:
    """One storage of the pool. Only values that somebody still needs refer to `storage`; what a recording keeps of
    it are addresses, so it is free exactly when a block of a real pool would be."""

    storage: torch.UntypedStorage
    poisoned: bool = False

    def is_free(self) -> bool:
        return torch._C._storage_Use_Count(self.storage._cdata) <= 1

    def scribble(self) -> None:
        self.storage.fill_(0xFF)  # type: ignore[attr-defined]

    def poison(self) -> None:
        if not self.poisoned:
            self.scribble()
            self.poisoned = True


@dataclass(slots=True, eq=False)
class EmulatedGraph:
    """One recording: calls in order, the blocks it makes, and those of other graphs that it may destroy."""

    calls: list[Callable[[], None]] = field(default_factory=list)
    made: list[_Block] = field(default_factory=list)
    free_before: list[weakref.ref[_Block]] = field(default_factory=list)
    """Blocks that nobody needed when the recording began: a real graph's own values may lie there."""
    free_after: list[weakref.ref[_Block]] = field(default_factory=list)
    """The same when it ended."""

    def replay(self) -> None:
        _poison(self.free_before)
        for block in self.made:
            block.poisoned = False
        for call in self.calls:
            call()
        _poison(self.free_after)


def _poison(blocks: list[weakref.ref[_Block]]) -> None:
    for reference in blocks:
        if (block := reference()) is not None:
            block.poison()


class EmulatedRecorder:
    """Records on any device; `poison=False` leaves reusable memory as it is."""

    name = "emulated"
    executes = True

    def __init__(self, *, poison: bool = True) -> None:
        self._poison = poison
        # By the storage's identity. Graphs own their blocks: a graph that is dropped gives its memory back.
        self._blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()
        self._graph: EmulatedGraph | None = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        assert self._graph is None, "a graph is already being recorded"
        self._graph = EmulatedGraph(free_before=self._let_reuse())

    def end(self) -> EmulatedGraph:
        graph, self._graph = self._graph, None
        assert graph is not None, "no graph is being recorded"
        for block in graph.made:
            block.poisoned = False
        graph.free_after = self._let_reuse()
        return graph

    def abort(self) -> None:
        self._graph = None

    def _let_reuse(self) -> list[weakref.ref[_Block]]:
        """Poison whatever nobody needs at this moment; the graph does so again at every replay."""
        if not self._poison:
            return []
        free = [weakref.ref(block) for block in self._blocks.values() if block.is_free()]
        _poison(free)
        return free

    def call(self, run: Callable[..., Any], args: Sequence[Any], *, opaque: bool) -> Any:
        assert self._graph is not None, "no graph is being recorded"
        if not opaque:
            with _RecordingMode(self):
                return run(*args)
        results = run(*args)
        self.record(run, args, {}, results, always=True)
        return results

    def record(self, func: Callable[..., Any], args: Any, kwargs: Any, results: Any, *, always: bool) -> None:
        """Keep one call that has just been carried out, with addresses of its tensors in place of the tensors.

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
        keep_args, keep_kwargs = tree_map(self.weaken, args), tree_map(self.weaken, kwargs)
        outputs = [(i, self.weaken(t)) for i, t in enumerate(_tensors(results)) if fresh[i]]

        # A graph has this moment's metadata baked in, so the call is repeated with that, not with the step's own.
        context = current_forward_context()

        def again() -> None:
            with set_forward_context(context):
                new = func(*keep_args, **keep_kwargs)
            if outputs:
                made = _tensors(new)
                for index, output in outputs:
                    copy_into(output, made[index])

        graph.calls.append(again)

    def record_allocation(self, results: Any) -> None:
        """Memory that nothing has written yet is rubbish at every replay."""
        graph = self._graph
        assert graph is not None
        for tensor in _tensors(results):
            block = self._own_block(tensor, graph)
            if self._poison:
                block.scribble()
                graph.calls.append(block.scribble)

    def weaken(self, tensor: Any) -> Any:
        """The same memory without a reference to it, if it belongs to the pool; anything else as it is."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            return tensor
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return tensor if block is None else unowned(tensor)

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


class _RecordingMode(TorchDispatchMode):
    def __init__(self, recorder: EmulatedRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
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
