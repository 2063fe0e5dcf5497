"""Python objects as text that is equal where they are equal, in every process: no address, no order of a set.

Functions are told by their code, classes by the code of all their methods, modules by name, tensors by their layout
(never by their values, which no traced program depends on).
"""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

_NUMBERS = (bool, int, float, complex)
_PLAIN = (*_NUMBERS, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_BUILTINS = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_PATCHED_BY_DYNAMO = ("__init__", "__setstate__", "___needs_generation_tag_patch")
"""Of `torch.nn.Module`, when Dynamo traces for the first time in a process."""
_NOT_BEHAVIOUR = (
    "__dict__", "__weakref__", "__doc__", "_abc_impl", "__annotations__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__static_attributes__", "__firstlineno__",
)  # fmt: skip
_DEEPEST = 12
"""Containers within containers, and functions within the closures of functions."""


class Undescribable(Exception):
    """An object of which no text can be made that would tell it from another one; the message names it."""


class Describer:
    """Texts for objects as they are now: each is looked at once, so one describer serves one moment."""

    def __init__(self) -> None:
        self.codes: set[str] = set()
        """Digests of all code that was described."""
        self._classes: dict[type, str] = {}
        self._functions: dict[int, tuple[Any, str]] = {}

    def constant(self, value: Any) -> str:
        """Of numbers, strings, torch's own constants, enumerators, and containers of them. Undescribable for others."""
        return self._text(value, strict=True, depth=0)

    def loose(self, value: Any) -> str:
        """The same, with a type's name for what else there is."""
        return self._text(value, strict=False, depth=0)

    def class_text(self, cls: type) -> str:
        """Name, and a digest of what the class and its bases are made of."""
        known = self._classes.get(cls)
        if known is None:
            self._classes[cls] = class_name(cls)  # a class that refers to itself
            digest = _digest(line for base in cls.__mro__ for line in self._class_lines(base))
            known = self._classes[cls] = f"{class_name(cls)} {digest}"
        return known

    def code_digest(self, code: types.CodeType) -> str:
        """Of what the code does: not of its file, lines, or what the interpreter noted while running it."""
        parts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_exceptiontable)
        constants = [self._text(c, False, 0) for c in code.co_consts]
        digest = _digest([code.co_name, *map(repr, parts), *map(repr, counts), *constants])
        self.codes.add(digest)
        return digest

    def _text(self, value: Any, strict: bool, depth: int) -> str:
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        if value is Ellipsis or value is NotImplemented:
            return repr(value)
        if depth > _DEEPEST:
            return self._otherwise(value, strict)
        if (parts := self._container(value, strict, depth + 1)) is not None:
            return parts
        if isinstance(value, enum.Enum):
            return f"{class_name(kind)}.{value.name} {self._text(value.value, False, depth + 1)}"
        if isinstance(value, types.CodeType):
            return f"code {self.code_digest(value)}"
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, type):
            return class_name(value) if not strict else self.class_text(value)
        if (function := self._callable(value, strict, depth + 1)) is not None:
            return function
        if isinstance(value, torch.Tensor) and not strict:
            return tensor_text(value)
        if isinstance(value, np.ndarray | np.generic):
            data = np.ascontiguousarray(value)
            content = data.tobytes() if data.dtype.kind != "O" else b""
            return f"numpy {data.dtype} {data.shape} {hashlib.sha256(content).hexdigest()}"
        return self._otherwise(value, strict)

    def _otherwise(self, value: Any, strict: bool) -> str:
        if strict:
            raise Undescribable(f"a {class_name(type(value))}")
        return f"some {class_name(type(value))}"

    def _container(self, value: Any, strict: bool, depth: int) -> str | None:
        name = class_name(type(value))
        if isinstance(value, Mapping) and (isinstance(value, dict) or type(value) is types.MappingProxyType):
            items = dict.items(value) if isinstance(value, dict) else value.items()
            pairs = (f"{self._text(k, strict, depth)}: {self._text(v, strict, depth)}" for k, v in items)
            return f"{name}{{{', '.join(pairs)}}}"
        if isinstance(value, set | frozenset):
            return f"{name}{{{', '.join(sorted(self._text(v, strict, depth) for v in value))}}}"
        if isinstance(value, tuple | list):
            return f"{name}({', '.join(self._text(v, strict, depth) for v in value)})"
        if isinstance(value, slice):
            return f"slice({', '.join(self._text(v, strict, depth) for v in (value.start, value.stop, value.step))})"
        return repr(value) if isinstance(value, range) else None

    def _callable(self, value: Any, strict: bool, depth: int) -> str | None:
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            return f"method of {self._text(value.__self__, strict, depth)}: {self._text(value.__func__, strict, depth)}"
        if isinstance(value, functools.partial):
            given = (value.func, value.args, value.keywords)
            return f"partial({', '.join(self._text(v, strict, depth) for v in given)})"
        if isinstance(value, functools._lru_cache_wrapper):
            return f"cached {self._text(value.__wrapped__, strict, depth)}"
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__} {self._text(value.__func__, False, depth)}"
        if isinstance(value, property):
            accessors = (value.fget, value.fset, value.fdel)
            return f"property({', '.join(self._text(v, False, depth) for v in accessors)})"
        if isinstance(value, _BUILTINS):
            return f"builtin {getattr(value, '__module__', None)}.{getattr(value, '__qualname__', value.__name__)}"
        if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator):
            return f"operator {value}"
        return None

    def _function(self, function: types.FunctionType, depth: int) -> str:
        known = self._functions.get(id(function))
        if known is None:
            name = f"function {function.__module__}.{function.__qualname__}"
            self._functions[id(function)] = (function, name)  # its closure may hold itself
            given = (function.__defaults__, function.__kwdefaults__, *map(_cell, function.__closure__ or ()))
            text = ", ".join(self._text(v, False, depth) for v in given)
            known = (function, f"{name} {self.code_digest(function.__code__)} {_digest([text])}")
            self._functions[id(function)] = known
        return known[1]

    def _class_lines(self, cls: type) -> Iterator[str]:
        yield class_name(cls)
        if cls.__module__ == "builtins":
            return
        left_out = _NOT_BEHAVIOUR + (_PATCHED_BY_DYNAMO if cls is torch.nn.Module else ())
        for name, value in sorted(vars(cls).items()):
            if name not in left_out:
                yield f"{name} = {self._text(value, False, 1)}"


def class_name(cls: type) -> str:
    """Module and qualified name."""
    return f"{cls.__module__}.{cls.__qualname__}"


def tensor_text(tensor: torch.Tensor) -> str:
    """What a trace depends on of a tensor: not its values, not where it lies."""
    described = f"{class_name(type(tensor))} {tensor.dtype} {tensor.device} {tuple(tensor.shape)}"
    if tensor.layout is not torch.strided:
        return f"{described} {tensor.layout} {tensor.requires_grad}"
    flags = f"{tensor.requires_grad} {tensor.is_conj()} {tensor.is_neg()} {tensor.is_inference()}"
    return f"{described} {tensor.stride()} {flags}"


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _digest(lines: Any) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:32]
