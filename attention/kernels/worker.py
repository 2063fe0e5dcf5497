"""Compiling a kernel in another process, into the folder that all processes of a user share.

That process needs no GPU: it is told what to compile for. So one that has a GPU only reads what it will launch from
disk, and is not kept from its own work by a compiler that is Python in part.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One kernel to compile; can be pickled."""

    module: str
    name: str
    """Of the JIT function, in `module`."""
    arguments: tuple[Any, ...]
    """As given to `warmup`: dtypes stand for tensors."""
    constants: Mapping[str, Any]
    target: tuple[Any, ...]
    """Fields of Triton's `GPUTarget`."""
    environment: Mapping[str, str]
    """Triton's variables: all that decides what is compiled, and where to."""

    @classmethod
    def of(cls, kernel: Any, arguments: tuple[Any, ...], constants: Mapping[str, Any]) -> Job:
        """The job of compiling `kernel` for the current GPU."""
        from triton.runtime import driver

        target = driver.active.get_current_target()
        return cls(
            module=kernel.__module__,
            name=kernel.__name__,
            arguments=arguments,
            constants=constants,
            target=(target.backend, target.arch, target.warp_size),
            environment=_variables(),
        )


def compile_here(job: Job) -> None:
    """Do a job in this process."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    before = _variables()
    _set_variables(job.environment)
    driver.set_active(_Target(GPUTarget(*job.target)))
    try:
        kernel = getattr(importlib.import_module(job.module), job.name)
        compiled = kernel.warmup(*job.arguments, grid=(1,), **job.constants)
        if job.target[0] == "cuda":
            _build_launcher(compiled)
    finally:
        driver.set_active(None)
        _set_variables(before)


def _build_launcher(compiled: Any) -> None:
    """Before 3.7, Triton calls a kernel through a module that a C compiler builds at the first launch. Have it built
    now, where that is possible: else it is built then."""
    from triton.backends.nvidia import driver

    if not hasattr(driver, "make_launcher"):
        return
    try:
        driver.CudaLauncher(compiled.src, compiled.metadata)
    except Exception:
        logger.debug("no launcher ahead", exc_info=True)


class _Target:
    """What compiling asks of a driver."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}


def _set_variables(wanted: Mapping[str, str]) -> None:
    for name in _variables().keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted)


def workers() -> Any | None:
    """Inductor's processes for compiling kernels, which have `submit(function, *arguments)`; None where there are none,
    or not yet."""
    from torch._inductor.async_compile import AsyncCompile

    try:
        return AsyncCompile.process_pool() if AsyncCompile.use_process_pool() else None
    except (AttributeError, RuntimeError):  # another version of torch, or a process that may have none
        return None
