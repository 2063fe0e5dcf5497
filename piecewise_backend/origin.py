"""For which `torch.compile` a graph is compiled: asked of Dynamo while it traces."""

from __future__ import annotations

import types
import weakref
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a graph comes from. Holds nothing alive but a code object."""

    code: types.CodeType | None = None
    """Of the traced function; None where no trace is going on."""
    _owner: weakref.ref[Any] | None = None
    _target: weakref.ref[Any] | None = None

    @property
    def owner(self) -> Any | None:
        """The backend object that a call of `torch.compile` made; None where it is gone or unknown."""
        return None if self._owner is None else self._owner()

    @property
    def target(self) -> Any | None:
        """The object whose method was traced; None for a function."""
        return None if self._target is None else self._target()


def current_origin() -> Origin:
    """Of the graph that Dynamo hands over at this moment; an empty one for a backend that is called by hand."""
    from torch._dynamo.symbolic_convert import InstructionTranslator, tls

    if getattr(tls, "current_tx", None) is None:
        return Origin()
    tracer: Any = InstructionTranslator.current_tx()
    owner = innermost_backend(tracer.output.compiler_fn)
    return Origin(tracer.f_code, _weak(owner), _weak(tracer.f_locals.get("self")))


def innermost_backend(callback: Any) -> Any:
    """The backend inside of the wrappers that Dynamo puts around it."""
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    return callback


def _weak(value: Any) -> weakref.ref[Any] | None:
    try:
        return None if value is None else weakref.ref(value)
    except TypeError:  # an object of a type that cannot be referred to weakly: only a method's own may be one
        return None
