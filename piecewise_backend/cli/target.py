"""`module:factory` and `path/to/file.py:factory`: the model that a command is about."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from piecewise_backend.names import unknown_name


@dataclass(frozen=True, slots=True)
class Target:
    """What a factory gave."""

    name: str
    model: Any
    inputs: tuple[Any, ...]
    """Example inputs; empty where it gave none."""


def load_target(text: str) -> Target:
    """Import, call the factory, and sort out what it returned.

    ValueError, naming near misses, for a module, file or factory that is not there, and for a factory that raises.
    """
    where, separator, name = text.rpartition(":")
    if not separator or not where or not name:
        raise ValueError(f"expected module:factory or path/to/file.py:factory, got {text!r}")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    found = getattr(module, name, None)
    if found is None:
        raise unknown_name(f"factory in {where}:", name, _factories(module))
    return _sorted_out(text, _call(text, found))


def _sorted_out(text: str, made: Any) -> Target:
    import torch

    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, ())
    if not callable(model):
        raise ValueError(
            f"{text} returned {_what(made)}; expected a model, or (model, inputs) with a tensor or a tuple of them"
        )
    given = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    if any(isinstance(value, dict) for value in given):
        raise ValueError(f"{text} returned inputs by name; give them in order, wrapping the model if need be")
    return Target(text, model.eval() if isinstance(model, torch.nn.Module) else model, given)


def _call(text: str, factory: Any) -> Any:
    """A module object is the model itself; anything else is called."""
    import torch

    if isinstance(factory, torch.nn.Module):
        return factory
    if not callable(factory):
        raise ValueError(f"{text} is {_what(factory)}, not a function that returns a model")
    try:
        return factory()
    except Exception as error:
        raise ValueError(f"{text} raised {type(error).__name__}: {error}{_line(error)}") from error


def _from_name(name: str) -> ModuleType:
    if (folder := str(Path.cwd())) not in sys.path:  # as `python -m` has it
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"{name} cannot be imported: {error}{_line(error)}") from error
        parent = error.name.rpartition(".")[0]
        paths = getattr(sys.modules.get(parent), "__path__", None) if parent else None
        near = [f"{parent}.{m.name}" if parent else m.name for m in pkgutil.iter_modules(paths)]
        raise unknown_name("module", error.name, near, show=0) from error
    except Exception as error:
        raise ValueError(f"{name} raised {type(error).__name__} on import: {error}{_line(error)}") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        there = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, n=3)
        hint = f"; did you mean {' or '.join(repr(str(path.with_name(n))) for n in near)}?" if near else ""
        raise ValueError(f"no file {str(path)!r}{hint}")
    sys.path.insert(0, str(path.parent.resolve()))  # as `python path/to/file.py` has it
    name = f"mrv2_target_{path.stem}" if path.stem in sys.modules else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} ends in .py"
    assert spec.loader is not None, f"{path} is a file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dynamo looks the globals of a function up by its module's name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} raised {type(error).__name__} on import: {error}{_line(error)}") from error
    return module


def _factories(module: ModuleType) -> list[str]:
    """Functions, classes and modules defined in a Python module."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and inspect.getmodule(value) in (module, None)
    ]


def _line(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    own = [f for f in frames if f.filename != __file__]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def _what(value: Any) -> str:
    return f"an object of type {type(value).__name__}"
