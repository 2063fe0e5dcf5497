"""What records a graph: the protocol that CUDA and emulated recorders share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class RecordedGraph(Protocol):
    """Work recorded once, to be repeated on the same memory."""

    def replay(self) -> None:
        """Repeat the work. Reads and writes the addresses seen while recording."""


class GraphRecorder(Protocol):
    """Records graphs one after another into one pool of memory.

    A graph's outputs stay valid until another graph of the same pool is replayed, unless a reference to them was held
    when that other graph was recorded.
    """

    name: str

    def session(self) -> AbstractContextManager[None]:
        """Surrounds any number of recordings and the eager work between them."""

    def begin(self) -> None:
        """Start a graph."""

    def call(self, run: Callable[..., Any], args: Sequence[Any], *, opaque: bool) -> Any:
        """Run `run(*args)` into the graph being recorded, and return what it returns.

        `opaque`: it launches kernels that PyTorch's dispatcher does not see (compiled code).
        """

    def end(self) -> RecordedGraph:
        """Finish the graph."""

    def abort(self) -> None:
        """Drop the graph being recorded, after an error."""

    @property
    def executes(self) -> bool:
        """Whether work is also carried out while it is recorded."""

    def weaken(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias of a recorded value that does not keep its memory from being reused by later graphs."""

    def memory_bytes(self) -> int:
        """Memory that recorded graphs hold so far, bytes."""


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a reference to it: whoever uses the result sees to it that the memory is there."""
    return unowned_all([tensor])[0]


def unowned_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`unowned` of each tensor; those that share memory share it in the result."""
    aliases: dict[int, Any] = {}
    return [_unowned(tensor, aliases) for tensor in tensors]


def _unowned(tensor: torch.Tensor, aliases: dict[int, Any]) -> torch.Tensor:
    storage = tensor.untyped_storage()
    address, num_bytes = storage.data_ptr(), storage.nbytes()
    if not num_bytes:
        return tensor
    if address not in aliases:
        aliases[address] = torch._C._construct_storage_from_data_pointer(address, tensor.device, num_bytes)
    with torch.inference_mode(tensor.is_inference()):
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(aliases[address], tensor.storage_offset(), tensor.shape, tensor.stride())
