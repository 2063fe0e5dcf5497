"""Dynamo's guards as data: what a trace relied on, where it is found, and whether it still holds.

A check is an aspect of the object at a place (its value, its type, its length, ...) and the text it had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piecewise_backend.runner.description import Describer, Undescribable, class_name, tensor_text
from piecewise_backend.runner.places import (
    ATTRIBUTES,
    SAME_PLACE,
    NotRecordable,
    Places,
    Unreachable,
    plain_key,
    source_name,
)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must be as it was."""

    place: int
    aspect: str
    argument: Any
    """A name, or another place, of an aspect that takes one."""
    expected: str


# Settings of the process: the key under which a trace is kept has them all, see `trace_key`.
_IN_KEY = frozenset(
    {
        "GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "TORCH_FUNCTION_STATE", "DEFAULT_DEVICE", "SHAPE_ENV",
        "AUTOGRAD_SAVED_TENSORS_HOOKS",
    }
)  # fmt: skip
_SAME_VALUE = frozenset({"EQUALS_MATCH", "CONSTANT_MATCH", "BOOL_MATCH", "NONE_MATCH"})
_SAME_OBJECT = frozenset(
    {"ID_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH", "CLOSURE_MATCH", "BUILTIN_MATCH"}
)
_SAME_KEYS = frozenset({"DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"})
_CONTAINS = frozenset({"DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"})

_ASPECTS: dict[str, Callable[[Describer, Any, Any], str]] = {
    "value": lambda describe, value, _: describe.constant(value),
    "object": lambda describe, value, _: describe.constant(value),
    "class": lambda describe, value, _: describe.class_text(type(value)),
    "length": lambda describe, value, _: f"{class_name(type(value))} {len(value)}",
    "keys": lambda describe, value, _: ", ".join(map(describe.constant, value)),
    "has attribute": lambda describe, value, name: str(hasattr(value, name)),
    "has own attribute": lambda describe, value, name: str(name in object.__getattribute__(value, "__dict__")),
    "contains": lambda describe, value, key: str(key in value),
    "is None": lambda describe, value, _: str(value is None),
    "tensor": lambda describe, value, _: tensor_text(value),
}


class GuardRecord:
    """Collects guards while Dynamo traces: `record` is the filter that `torch.compile` is given."""

    def __init__(self, places: Places, describe: Describer, scope: Mapping[str, Any]) -> None:
        self.places = places
        self.describe = describe
        self.scope = scope
        self.checks: dict[Check, None] = {}
        self.obstacle: str | None = None
        """Why the guards cannot be kept."""

    def record(self, entries: Sequence[Any]) -> list[bool]:
        """A guard filter: takes note of all guards and keeps none, since the caller calls the traced code once."""
        for entry in entries:
            try:
                self._add(entry)
            except Exception as error:  # torch's own records too, which differ from version to version
                what = str(error) if isinstance(error, NotRecordable | Undescribable | Unreachable) else repr(error)
                self.obstacle = f"{what}, guarded as {entry.guard_type} at {entry.name or 'no place'}"
                break
        return [False] * len(entries)

    def _add(self, entry: Any) -> None:
        kind, source = entry.guard_type, entry.orig_guard.originating_source
        if kind in _IN_KEY:
            return
        create = entry.orig_guard.create_fn
        given = create.keywords if isinstance(create, functools.partial) else {}
        if isinstance(create, functools.partial) and create.args:
            raise NotRecordable(f"a guard {kind} with arguments at {entry.name}")
        aspect = _aspect_of(kind)
        argument: Any = None
        if kind == "DUPLICATE_INPUT":
            argument = self.places.of_source(given["source_b"], self.scope)
        elif kind == "NOT_PRESENT_IN_GENERIC_DICT":
            argument = given["attr"]
        elif kind == "HASATTR":
            source, argument = _attribute_of(source, given)
        elif kind in _CONTAINS:
            argument = plain_key(given["key"], source)
        place = self.places.of_source(source, self.scope)
        value = self.places.get(place)
        seen = entry.value if entry.has_value and kind != "HASATTR" else value
        expected = observe(self.places, self.describe, value, aspect, argument)
        if value is not seen and expected != observe(self.places, self.describe, seen, aspect, argument):
            raise NotRecordable(f"a guard {kind} on what is not found again at {entry.name}")
        self.checks[Check(place, aspect, argument, expected)] = None


def _aspect_of(kind: str) -> str:
    if kind in _SAME_VALUE:
        return "value"
    if kind in _SAME_OBJECT:
        return "object"
    if kind in _SAME_KEYS:
        return "keys"
    if kind in _CONTAINS:
        return "contains"
    names = {
        "TYPE_MATCH": "class",
        "SEQUENCE_LENGTH": "length",
        "EMPTY_NN_MODULE_HOOKS_DICT": "length",
        "HASATTR": "has attribute",
        "NOT_PRESENT_IN_GENERIC_DICT": "has own attribute",
        "NOT_NONE_MATCH": "is None",
        "TENSOR_MATCH": "tensor",
        "DUPLICATE_INPUT": "same as",
    }
    if kind not in names:
        raise NotRecordable(f"a guard of kind {kind}")
    return names[kind]


def _attribute_of(source: Any, given: Mapping[str, Any]) -> tuple[Any, str]:
    """(the object's source, the attribute's name): older versions of torch guard on the attribute's own source."""
    if given.get("attr") is not None:
        return source, given["attr"]
    while type(source).__name__ in SAME_PLACE:
        source = source.base
    if type(source).__name__ not in ATTRIBUTES:
        raise NotRecordable(f"a guard HASATTR at {source_name(source)}")
    return source.base, source.member


def observe(places: Places, describe: Describer, value: Any, aspect: str, argument: Any) -> str:
    """How an aspect of `value` is now. Undescribable, Unreachable."""
    if aspect == "same as":
        return str(value is places.get(argument))
    return _ASPECTS[aspect](describe, value, argument)


def first_failed(checks: Sequence[Check], places: Places, describe: Describer) -> str | None:
    """What is not as it was, in words; None where everything is."""
    for check in checks:
        try:
            now = observe(places, describe, places.get(check.place), check.aspect, check.argument)
        except (Unreachable, Undescribable) as error:
            return str(error)
        except Exception as error:  # the object there is of another kind now
            return f"{places.name(check.place)}: {type(error).__name__}: {error}"
        if now != check.expected:
            what = check.aspect if check.argument is None else f"{check.aspect} {check.argument!r}"
            return f"{places.name(check.place)}: {what} was {check.expected[:200]}, is {now[:200]}"
    return None
