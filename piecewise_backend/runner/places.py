"""Ways to objects: from the model, from the arguments, or from an imported module, one step (attribute, item, ...) at a
time. Dynamo says of everything it reads where it found it, and so it is found again on a model of another process."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from piecewise_backend.runner.description import class_name

_NOT_THERE = object()

# Sources that add nothing to the place of their base.
SAME_PLACE = frozenset(
    {"NNModuleSource", "UnspecializedNNModuleSource", "UnspecializedBuiltinNNModuleSource", "SkipGuardSource"}
)
ATTRIBUTES = frozenset(
    {"AttrSource", "GenericAttrSource", "ParamBufferSource", "UnspecializedParamBufferSource", "CellContentsSource"}
)
_ITEM = frozenset({"GetItemSource", "DictGetItemSource", "ListGetItemSource"})
_NAMED = {"CodeSource": "__code__", "ClosureSource": "__closure__", "TypeMROSource": "__mro__"}


class NotRecordable(Exception):
    """A guard, or the place of an object, of a kind that cannot be kept; the message says which."""


class Unreachable(Exception):
    """There is nothing at a recorded place."""


class Places:
    """Ways to objects, each the number of a shorter one and one more step; looked up from `roots`."""

    def __init__(self, roots: Mapping[str, Any], rows: Sequence[Sequence[Any]] = ()) -> None:
        self.roots = dict(roots)
        self.rows: list[tuple[int, str, Any]] = []
        self._numbers: dict[Any, int] = {}
        self._found: dict[int, Any] = {}
        for parent, step, argument in rows:
            self.add(int(parent), str(step), argument)

    def add(self, parent: int, step: str, argument: Any) -> int:
        """The number of a place."""
        row = (parent, step, argument)
        key = (parent, step, type(argument), argument)
        if key not in self._numbers:
            self._numbers[key] = len(self.rows)
            self.rows.append(row)
        return self._numbers[key]

    def get(self, number: int) -> Any:
        """The object at a place now. Unreachable if there is none."""
        if number not in self._found:
            try:
                parent, step, argument = self.rows[number]
                base = self.get(parent) if parent >= 0 else self.roots
                self._found[number] = _STEPS[step](base, argument)
            except Exception as error:
                raise Unreachable(f"{self.name(number)}: {type(error).__name__}: {error}") from error
        return self._found[number]

    def name(self, number: int) -> str:
        """A place to read: model.layers.attr 'head_dim'."""
        parent, step, argument = self.rows[number]
        before = self.name(parent) if parent >= 0 else ""
        if step in ("attribute", "item"):
            return f"{before}.{argument}" if step == "attribute" else f"{before}[{argument!r}]"
        return f"{step}({before})" if argument is None else f"{step}({before}, {argument!r})"

    def of_source(self, source: Any, scope: Mapping[str, Any]) -> int:
        """The place of a Dynamo source; `scope`: the globals that it names. NotRecordable for a kind unknown here."""
        kind = type(source).__name__
        if kind in SAME_PLACE:
            return self.of_source(source.base, scope)
        if kind == "LocalSource" and source.local_name in self.roots:
            return self.add(-1, "root", source.local_name)
        if kind == "GlobalSource":
            return self._of_global(source.global_name, scope)
        if kind == "ImportSource":
            return self.add(-1, "module", source.module_name)
        if not hasattr(source, "base"):
            raise NotRecordable(f"a {kind} ({source_name(source)})")
        base = self.of_source(source.base, scope)
        return self._one_step(kind, source, base, scope)

    def _one_step(self, kind: str, source: Any, base: int, scope: Mapping[str, Any]) -> int:
        if kind in ATTRIBUTES:
            return self.add(base, "attribute", source.member)
        if kind in _NAMED:
            return self.add(base, "attribute", _NAMED[kind])
        if kind == "TypeDictSource":
            return self.add(base, "class_dict", None)
        if kind == "TypeSource":
            return self.add(base, "type", None)
        if kind == "DefaultsSource":
            return self.add(self.add(base, "attribute", source.field), "item", plain_key(source.idx_key, source))
        if kind == "ConstDictKeySource":
            return self.add(base, "key", plain_key(source.index, source))
        if kind == "DictSubclassGetItemSource":
            return self.add(base, "dict_item", plain_key(source.index, source))
        if kind == "TensorPropertySource":
            return self.add(base, source.prop.name.lower(), source.idx)
        by_key = type(getattr(source, "index", None)).__name__ == "ConstDictKeySource"
        if by_key and self.of_source(source.index.base, scope) == base:
            return self.add(base, "value", plain_key(source.index.index, source))
        if kind in _ITEM and not getattr(source, "index_is_slice", False):
            return self.add(base, "item", plain_key(source.index, source))
        raise NotRecordable(f"a {kind} ({source_name(source)})")

    def _of_global(self, name: str, scope: Mapping[str, Any]) -> int:
        value = scope.get(name, _NOT_THERE)
        if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is value:
            return self.add(-1, "module", value.__name__)
        if name.startswith("__builtins_dict__"):
            return self.add(self.add(-1, "module", "builtins"), "attribute", "__dict__")
        raise NotRecordable(f"the global {name!r}")


def plain_key(index: Any, source: Any) -> Any:
    """`index`, where it can be written down; NotRecordable for the key of another kind that `source` has."""
    if index is None or type(index) in (str, int, bool):
        return index
    raise NotRecordable(f"an item under a {class_name(type(index))} ({source_name(source)})")


def source_name(source: Any) -> str:
    """What Dynamo calls a source."""
    name = source.name
    return str(name() if callable(name) else name)


def _module(_: Any, name: str) -> Any:
    if name.partition(".")[0] == "torch" and name not in sys.modules:
        return importlib.import_module(name)
    return sys.modules[name]


_STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "root": lambda roots, name: roots[name],
    "module": _module,
    "attribute": getattr,
    "item": lambda base, key: base[key],
    "dict_item": dict.__getitem__,
    "key": lambda base, index: list(dict.keys(base))[index],
    "value": lambda base, index: list(dict.values(base))[index],
    "type": lambda base, _: type(base),
    "class_dict": lambda base, _: dict(base.__dict__),
    "size": lambda base, dim: base.size()[dim],
    "stride": lambda base, dim: base.stride()[dim],
    "storage_offset": lambda base, _: base.storage_offset(),
}
