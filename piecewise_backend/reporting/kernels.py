"""Kernels in the Python module that Inductor generated for a piece."""

from __future__ import annotations

import re
from collections.abc import Iterator

_KERNEL = re.compile(r"^(?P<name>\w+) = async_compile\.(?P<how>\w+)\((?P<head>.*?)'''(?P<code>.*?)'''", re.M | re.S)
_LIBRARY_CALL = re.compile(r"\b(extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.\w[\w.]*)\(")


def kernel_sources(generated: str | None) -> Iterator[tuple[str, str, str]]:
    """(name, "triton" or "c++", source) of each kernel, in the order of the module."""
    for found in _KERNEL.finditer(generated or ""):
        language = "triton" if found["how"] == "triton" else "c++"
        yield found["name"], language, found["code"].strip("\n")


def library_calls(generated: str | None) -> list[str]:
    """Kernels of libraries that the module calls, in order of first call."""
    return list(dict.fromkeys(_LIBRARY_CALL.findall(generated or "")))
