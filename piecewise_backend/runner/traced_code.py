"""The code behind a trace: files of the functions that were traced, and what lies behind the operators in a graph."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from piecewise_backend.runner.description import Describer
from piecewise_backend.runner.places import NotRecordable

_imported_at = time.time()
_TORCH_NAMESPACES = frozenset({"aten", "prims", "prim", "inductor", "_c10d_functional", "profiler"})
_OWN_PACKAGES = ("torch", "_operator", "operator", "math", "builtins", "piecewise_backend", "attention")


def file_digest(path: str) -> str:
    """Of a file's content; "missing" where there is none."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return "missing"


def code_files(codes: Iterable[types.CodeType], describe: Describer) -> dict[str, str]:
    """File to digest, for the files that `codes` were read from.

    NotRecordable for code that is in no file and that `describe` has not met among the functions and classes that the
    guards name, and for a file that was changed since this process read it.
    """
    met, files = frozenset(describe.codes), dict[str, str]()
    for code in dict.fromkeys(codes):
        path, digest = code.co_filename, describe.code_digest(code)
        if path.startswith("<frozen"):  # a part of Python itself
            continue
        if Path(path).is_file():
            files[path] = file_digest(path)
            if Path(path).stat().st_mtime > _imported_at - 60 and digest not in met | _digests_in_file(path, describe):
                raise NotRecordable(f"the code of {code.co_name}: {path} was changed since it was imported")
        elif digest not in met:
            raise NotRecordable(f"the code of {code.co_name}, which is in no file ({path})")
    return files


def _digests_in_file(path: str, describe: Describer) -> set[str]:
    """Digests of all code in a file as it is now."""
    waiting = [compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)]
    found = set()
    while waiting:
        code = waiting.pop()
        found.add(describe.code_digest(code))
        waiting.extend(c for c in code.co_consts if isinstance(c, types.CodeType))
    return found


def operator_texts(gm: fx.GraphModule, describe: Describer) -> dict[str, str]:
    """For each operator in `gm` that is not torch's own: its name, and what decides what tracing makes of it.

    NotRecordable for what cannot be told from another one: a module or a constant tensor in the graph, a Triton kernel.
    """
    return {name: operator_text(name, describe) for name in dict.fromkeys(_foreign_operators(gm))}


def _foreign_operators(gm: fx.GraphModule) -> Iterator[str]:
    for part in (module for module in gm.modules() if isinstance(module, fx.GraphModule)):
        for node in part.graph.nodes:
            if node.op == "get_attr" and not isinstance(_attribute(part, str(node.target)), fx.GraphModule):
                raise NotRecordable(f"the constant {node.target} in the traced graph")
            if node.op == "call_module":
                raise NotRecordable(f"the module {node.target} in the traced graph")
            if node.op == "call_function" and (name := _foreign_name(node.target)) is not None:
                yield name


def _foreign_name(target: Any) -> str | None:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = target._schema.name if isinstance(target, torch._ops.OpOverload) else target._qualified_op_name
        return None if name.partition("::")[0] in _TORCH_NAMESPACES else name
    if isinstance(target, torch._ops.HigherOrderOperator):
        if "triton" in target.name():
            raise NotRecordable(f"a Triton kernel that the model launches itself ({target.name()})")
        return None
    if isinstance(target, types.FunctionType) and target.__module__.partition(".")[0] not in _OWN_PACKAGES:
        return f"{target.__module__}:{target.__qualname__}"
    return None


def operator_text(name: str, describe: Describer) -> str:
    """Schemas, fakes and the files that kernels were registered in, of "namespace::operator"; of a function
    ("module:name") its code. "missing" for what is not there."""
    namespace, is_operator, rest = name.partition("::")
    if not is_operator:
        module, _, path = name.partition(":")
        found = functools.reduce(lambda o, part: getattr(o, part, None), path.split("."), sys.modules.get(module))
        return describe.constant(found)
    packet = getattr(getattr(torch.ops, namespace), rest, None)
    if packet is None:
        return "missing"
    schemas = [str(getattr(packet, overload)._schema) for overload in sorted(packet.overloads())]
    definition = torch._library.custom_ops.OPDEFS.get(name)
    fakes = (getattr(definition, "_abstract_fn", None), _registered_fake(name))
    files = sorted(set(re.findall(r"registered at (\S+\.py):\d+", torch._C._dispatch_dump(name))))
    return " ".join([*schemas, *map(describe.loose, fakes), *(f"{path} {file_digest(path)}" for path in files)])


def _registered_fake(name: str) -> Any:
    kernel = torch._library.simple_registry.singleton.find(name).fake_impl.kernel
    return None if kernel is None else kernel.func


def changed_code(files: Mapping[str, str], operators: Mapping[str, str], describe: Describer) -> str | None:
    """What of recorded files and operators is not as it was; None where everything is."""
    for path, digest in files.items():
        if file_digest(path) != digest:
            return f"{path} was changed"
    for name, text in operators.items():
        if operator_text(name, describe) != text:
            return f"operator {name} was changed"
    return None


def _attribute(gm: fx.GraphModule, target: str) -> Any:
    return functools.reduce(getattr, target.split("."), gm)
