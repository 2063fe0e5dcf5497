"""`report(compiled)`: the report of whatever `torch.compile(model, backend="mrv2")` or the runner returned."""

from __future__ import annotations

import types
from typing import Any

from piecewise_backend.backend import alive_functions
from piecewise_backend.origin import innermost_backend
from piecewise_backend.reporting.report import Report


def report(compiled: Any) -> Report:
    """The report of `compiled`: a function or module from `torch.compile(..., backend="mrv2")`, a module after
    `module.compile(backend="mrv2")`, an `LLM`, a `ModelRunner`, or the backend's own function.

    A compiled function has a graph for each part between graph breaks and for each recompilation. The newest one's
    report is returned, and it has those of the others in `others`, oldest first. TypeError for anything else,
    RuntimeError where nothing has been compiled yet.
    """
    own = getattr(compiled, "report", None)
    if isinstance(own, Report):
        return own
    owner = _owner_of(compiled)
    if owner is None:
        raise TypeError(
            f"a {type(compiled).__name__} has no report; allowed: what torch.compile(model, backend='mrv2') returned, "
            "an LLM, a ModelRunner. piecewise_backend.reports() has those of everything compiled in this process"
        )
    found: list[Report] = [function.report for function in _functions_of(compiled, owner)]
    if not found:
        raise RuntimeError(
            "mrv2 has compiled nothing for this: torch.compile compiles at the first call, so call it once. If it was "
            "called, it is served by what was compiled for an equal model, whose report piecewise_backend.reports() "
            f"has. Its backend is {getattr(owner, 'compiler_name', type(owner).__name__)!r}"
        )
    *others, newest = found
    newest.others = tuple(others)
    for other in others:
        other.others = ()
    return newest


def _owner_of(compiled: Any) -> Any | None:
    """The backend object that one call of `torch.compile` made; None for what no such call returned."""
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled
    context = getattr(compiled, "dynamo_ctx", None)
    callback = getattr(context, "callback", None) or _closed_over(compiled, "callback")
    return innermost_backend(callback) if callable(callback) else None


def _closed_over(function: Any, name: str) -> Any | None:
    if not isinstance(function, types.FunctionType) or not hasattr(function, "_torchdynamo_orig_callable"):
        return None
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return next((cell.cell_contents for variable, cell in cells if variable == name), None)


def _functions_of(compiled: Any, owner: Any) -> list[Any]:
    """Alive functions compiled for `owner`, oldest first.

    Dynamo takes what an earlier `torch.compile` of the same function with the same settings made, rather than compile
    again: where nothing was compiled for `owner`, that is looked for.
    """
    alive = alive_functions()
    found = [function for function in alive if function.origin.owner is owner]
    if found:
        return found
    code, target = _root_of(compiled)
    equal = [f.origin for f in alive if f.origin.owner == owner and f.origin.code is code and f.origin.target is target]
    return [function for function in alive if equal and function.origin.owner is equal[-1].owner]


def _root_of(compiled: Any) -> tuple[types.CodeType | None, Any | None]:
    """(code, object it is a method of) of what was given to `torch.compile`."""
    module = getattr(compiled, "_orig_mod", None)
    function = getattr(compiled, "_torchdynamo_orig_callable", None) if module is None else module.forward
    return getattr(function, "__code__", None), getattr(function, "__self__", None)
