"""The key under which a traced program is kept: everything that is known before tracing, and decides its result."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from piecewise_backend.breakpoints import find_breakpoints
from piecewise_backend.config import Options
from piecewise_backend.environment import stable_text
from piecewise_backend.runner.description import tensor_text

FORMAT = 1
_LIBRARIES = ("triton", "transformers", "numpy")


def trace_key(model: str, views: Sequence[torch.Tensor], options: Options, piece_environment: str) -> str:
    """Of a call on `views` of the model that the text `model` tells of. `piece_environment`: what the keys of all its
    pieces have in common."""
    lines = [
        f"format {FORMAT} {package_digest()}",
        f"python {sys.version}",
        *(f"{name} {_version(name)}" for name in _LIBRARIES),
        piece_environment,
        f"dynamo {stable_text(_dynamo_settings())}",
        f"state {_process_state()}",
        f"merge_linears {options.merge_linears}",
        *sorted(repr(dataclasses.astuple(b)) for b in find_breakpoints(options.splitting_ops).values()),
        *(f"argument {tensor_text(view)} + {view.storage_offset()}" for view in views),
        model,
    ]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def may_be_kept() -> str | None:
    """Why nothing that is traced now could be kept; None where it can."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    modes = [mode for mode in modes if not isinstance(mode, DeviceContext)]  # the default device is part of the key
    if modes:
        return f"{type(modes[-1]).__name__} is active, and what it does is not known"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a function transform (vmap, grad) is active"
    return None


def _process_state() -> str:
    """Settings that are no part of a piece's environment."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return f"{torch.is_grad_enabled()} {torch.get_default_device()} {hooks is not None} {sys.flags.optimize}"


def _dynamo_settings() -> dict[str, object]:
    return {
        k: v for k, v in torch._dynamo.config.get_config_copy().items() if not k.endswith(("_path", "_dir", "_root"))
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def package_digest() -> str:
    """Of the sources of this package and of `attention`: how a program is made, and what its operators are."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for package in ("attention", "piecewise_backend"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
