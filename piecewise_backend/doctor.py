"""What this machine can do with mrv2, and why not more."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.table import Table
from rich.text import Text

from attention.registry import available_backends, get_backend
from attention.specs import AttentionSpec
from piecewise_backend.config import environment_cache_dir


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    what: str
    works: bool
    detail: str
    """What is there, or why it is not and what would bring it."""


def examine() -> Iterator[Finding]:
    """Look at everything mrv2 can use here."""
    yield Finding("torch", _at_least(torch.__version__, (2, 11)), f"{torch.__version__} (2.11 or later is needed)")
    yield _entry_point()
    yield from _recorders()
    yield _inductor()
    yield from _attention()
    for name, why in _OPTIONAL.items():
        found = importlib.util.find_spec(name) is not None
        version = _version(name) if found else f"not installed: {why}"
        yield Finding(name, found, version)
    yield _cache_folder()


_OPTIONAL = {
    "transformers": "needed for Hugging Face models (pip install 'mrv2[huggingface]')",
    "triton": "needed for the triton attention backend, and by Inductor on a GPU",
    "flashinfer": "one more attention backend on a GPU (pip install 'mrv2[flashinfer]')",
    "depyf": "readable dumps of compiled code (pip install 'mrv2[debug]')",
}


def table() -> Table:
    """The findings, for a terminal."""
    result = Table(title=f"mrv2 doctor: {platform.machine()}, Python {platform.python_version()}", title_justify="left")
    for column in ("", "what", "detail"):
        result.add_column(column)
    for finding in examine():
        mark = Text("yes", style="green") if finding.works else Text("no", style="yellow")
        result.add_row(mark, Text(finding.what), Text(finding.detail))  # Text: brackets are not markup
    return result


def _entry_point() -> Finding:
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name="mrv2")
    detail = "torch.compile finds it by name" if found else "not installed as a package: pip install it, or import it"
    return Finding('backend="mrv2"', bool(found), detail)


def _recorders() -> Iterator[Finding]:
    if torch.cuda.is_available():
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        yield Finding("CUDA graphs", True, f"{name}, compute capability {capability[0]}.{capability[1]}")
    else:
        built = (
            f"torch is built for CUDA {torch.version.cuda}, but" if torch.version.cuda else "torch is a CPU build and"
        )
        yield Finding("CUDA graphs", False, f"{built} no CUDA device is seen; models run compiled, without graphs")
    yield Finding("emulated recorder", True, "checks capture logic on any device: options={'recorder': 'emulated'}")


def _inductor() -> Finding:
    if torch.cuda.is_available():
        return Finding("Inductor", importlib.util.find_spec("triton") is not None, "compiles pieces with Triton")
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return Finding("Inductor", True, f"compiles pieces with {get_cpp_compiler()}")
    except Exception as error:
        return Finding("Inductor", False, f"{error}; pieces run as traced until a C++ compiler is installed")


def _attention() -> Iterator[Finding]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_size=128, block_size=16, dtype=dtype, scale=1.0)
    for name in available_backends():
        try:
            reason = get_backend(name).unsupported_reason(spec, device)
        except ImportError as error:
            reason = f"not importable: {error}"
        detail = f"runs on {device.type}" if reason is None else reason
        yield Finding(f"attention backend {name!r}", reason is None, detail)


def _cache_folder() -> Finding:
    folder = environment_cache_dir()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    writable = os.access(existing, os.W_OK)
    detail = f"{folder}" if writable else f"{existing} is not writable: pieces are compiled in every process"
    return Finding("artifact folder", writable, detail + " (set MRV2_CACHE_DIR to move it)")


def _version(name: str) -> str:
    for distribution in (name, f"{name}-python"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "installed"


def _at_least(version: str, least: tuple[int, int]) -> bool:
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= least
