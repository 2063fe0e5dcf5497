"""The state of a model that tracing it may depend on, as one text: everything reachable but the values of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from piecewise_backend.cudagraph.rows import span
from piecewise_backend.runner.description import Describer, Undescribable, class_name

_MOST_OBJECTS = 200_000
_RANDOM_NAMES = frozenset({"_original_object_hash"})
"""Attributes made by Python's `hash`, which differs from process to process (transformers' generation settings). Were a
trace to read one, its guard would show it."""
_OPAQUE = ("logging.Logger", "_thread.lock", "_thread.RLock")


def model_text(root: Any, describe: Describer) -> str:
    """A listing of the objects that `root` reaches through attributes and containers, one line each: the code of its
    class and its attributes, with numbers for other objects, so that it shows what is shared.

    Wider than what a trace reads, and so a net below Dynamo's guards, which leave some things out (attributes of
    torch's own modules). Undescribable for a model that reaches more than 200000 objects.
    """
    return "\n".join(_Listing(describe).lines(root))


class _Listing:
    def __init__(self, describe: Describer) -> None:
        self.describe = describe
        self.numbers: dict[int, int] = {}
        self.waiting: deque[Any] = deque()
        self.keep: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.hooks: set[int] = set()
        self.handles: dict[Any, int] = {}

    def lines(self, root: Any) -> Iterator[str]:
        self._refer(root)
        while self.waiting:
            if len(self.numbers) > _MOST_OBJECTS:
                raise Undescribable(f"a model that refers to more than {_MOST_OBJECTS} objects")
            yield self._line(self.waiting.popleft())
        yield from _shared_memory(self.tensors)

    def _refer(self, value: Any) -> str:
        """`value` itself, where it is a constant; else its number, and a line of its own later."""
        if value is None or type(value) in (bool, int, float, str):
            return repr(value)
        attributes = _attributes(value)
        is_container = isinstance(value, dict | list | tuple | set | frozenset)
        if is_container and not value and not attributes:
            return f"empty {class_name(type(value))}"
        is_held = is_container or isinstance(value, torch.Tensor) or attributes
        if not is_held or isinstance(value, type) or class_name(type(value)) in _OPAQUE or _is_function(value):
            text = self.describe.loose(value)
            return text if not text.startswith("some ") else f"some {self.describe.class_text(type(value))}"
        number = self.numbers.get(id(value))
        if number is None:
            number = self.numbers[id(value)] = len(self.numbers)
            self.waiting.append(value)
            self.keep.append(value)
        return f"#{number}"

    def _line(self, value: Any) -> str:
        number = self.numbers[id(value)]
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return f"#{number} {self.describe.loose(value)}"
        parts = [f"#{number}", self.describe.class_text(type(value))]
        attributes = sorted(_attributes(value).items())
        if isinstance(value, torch.nn.Module):
            self.hooks.update(id(v) for name, v in attributes if "_hooks" in name)
        if id(value) in self.hooks:  # under numbers that count all hooks of the process
            parts += [f"{self.handles.setdefault(k, len(self.handles))}: {self._refer(v)}" for k, v in value.items()]
        elif isinstance(value, dict):
            parts += [f"{self._refer(k)}: {self._refer(v)}" for k, v in dict.items(value)]
        elif isinstance(value, list | tuple):
            parts += map(self._refer, value)
        elif isinstance(value, set | frozenset):
            parts += sorted(map(self.describe.loose, value))
        parts += [f".{name} = {self._refer(v)}" for name, v in attributes]
        return ", ".join(parts)


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, torch.nn.Module) and hasattr(value, "__qualname__")


def _attributes(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        found = {}
    attributes = {str(k): v for k, v in found.items() if k not in _RANDOM_NAMES} if isinstance(found, dict) else {}
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member: Any = cls.__dict__.get(name)
            if hasattr(member, "__get__") and name not in ("__dict__", "__weakref__"):
                try:
                    attributes[name] = member.__get__(value, cls)
                except AttributeError:  # not assigned
                    attributes[name] = None
    return attributes


def _shared_memory(tensors: list[torch.Tensor]) -> Iterator[str]:
    """Lines for tensors that share a storage. Parameters that do so without overlapping count as separate: that is what
    merged ones become."""
    storages: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided:
            storages.setdefault(tensor.untyped_storage()._cdata, []).append((index, tensor))
    for shared in storages.values():
        only_parameters = all(isinstance(tensor, torch.nn.Parameter) for _, tensor in shared)
        if len(shared) > 1 and not (only_parameters and are_separate([tensor for _, tensor in shared])):
            places = (f"{index} at {tensor.storage_offset()}" for index, tensor in shared)
            yield f"tensors {', '.join(places)} share a storage"


def are_separate(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors of one storage do not overlap: no byte between first and last element is another's too."""
    end = -1
    for start, size in sorted((t.data_ptr(), span(t.shape, t.stride()) * t.element_size()) for t in tensors):
        if start < end:
            return False
        end = start + size
    return True
