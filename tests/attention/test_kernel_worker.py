"""Kernels compiled by other processes: on disk before this one asks, and done here whatever happens to them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.kernels import ahead
from attention.kernels.ahead import KernelsAhead
from attention.kernels.worker import Job, compile_here

pytest.importorskip("triton", reason="compiles with Triton")

IN_A_NEW_PROCESS = """
    import os
    import torch, triton
    from torch._inductor.async_compile import AsyncCompile
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from attention.kernels import ahead
    from attention.kernels.few_rows import one_row_kernel
    from attention.kernels.worker import _Target

    if __name__ == "__main__":
        driver.set_active(_Target(GPUTarget("cuda", 90, 32)))
        hits = []
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        x = torch.empty(64, dtype=torch.float16)
        constants = {"BLOCK_N": 4, "BLOCK_K": 64, "HAS_BIAS": False, "OVERLAP": True, "launch_pdl": True}
        AsyncCompile.wait_pool_ready()
        kernels = ahead.KernelsAhead(in_workers=True)
        kernels.compile([(one_row_kernel, (1,), (x, x, x, x, rows, 64), constants) for rows in (1, 16, 17)])
        kernels.wait()
        assert hits == [True] * 3, hits  # compiled by others, read by this one
        kernels = ahead.KernelsAhead()
        kernels.compile([(one_row_kernel, (1,), (x, x, x, x, 4, 64), constants | {"BLOCK_N": 2})])
        kernels.wait()
        assert hits[3:] == [False], hits
"""


def test_what_workers_compile_is_read_from_disk_here(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(IN_A_NEW_PROCESS))
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    run = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


class Kernel:
    """Stands for a JIT function."""

    __name__ = "kernel"

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: object, grid: object, **constants: object) -> None:
        self.compiled.append(arguments)


class Pool:
    """Stands for Inductor's processes."""

    def __init__(self, end: Callable[[Future[None]], object]) -> None:
        self.end, self.jobs = end, list[tuple[Any, ...]]()

    def submit(self, *job: Any) -> Future[None]:
        self.jobs.append(job)
        future: Future[None] = Future()
        self.end(future)
        return future


def refuse(future: Future[None]) -> None:
    raise TypeError("cannot pickle this")


@pytest.mark.parametrize(
    "end",
    [
        lambda future: future.set_result(None),
        lambda future: future.set_exception(OSError("the worker died")),
        lambda future: None,
        refuse,
    ],
    ids=["done", "failed", "silent", "refused"],
)
def test_each_kernel_is_asked_for_here_once_whatever_its_worker_does(end, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, kernel = Pool(end), Kernel()
    monkeypatch.setattr(ahead, "workers", lambda: pool)
    monkeypatch.setattr(ahead, "_PATIENCE", 0.1)
    monkeypatch.setattr(Job, "of", classmethod(lambda cls, kernel, arguments, constants: arguments))
    x, kernels = torch.empty(3, dtype=torch.bfloat16), KernelsAhead(in_workers=True)
    kernels.compile([(kernel, (1,), (x, number), {}) for number in (1, 2)])
    kernels.wait()
    assert kernel.compiled == [(torch.bfloat16, 1), (torch.bfloat16, 2)]
    assert [job[1] for job in pool.jobs] == kernel.compiled


def test_without_workers_a_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(ahead, "workers", lambda: None)
    kernels = KernelsAhead(in_workers=True)
    kernels.compile([(kernel, (1,), (7,), {})])
    kernels.wait()
    assert kernel.compiled == [(7,)]


def test_a_job_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_OF_THE_WORKER", "1")
    before, seen = dict(os.environ), {}

    class Kernels:
        @staticmethod
        def warmup(*arguments: object, grid: object, **constants: object) -> None:
            from triton.runtime import driver

            seen.update(os.environ, target=driver.active.get_current_target().arch)
            raise ValueError("no such tile")

    monkeypatch.setattr(ahead, "a_kernel", Kernels, raising=False)
    job = Job(
        module=ahead.__name__,
        name="a_kernel",
        arguments=(),
        constants={},
        target=("cuda", 90, 32),
        environment={"TRITON_CACHE_DIR": "/there"},
    )
    with pytest.raises(ValueError, match="no such tile"):
        compile_here(job)
    assert seen["TRITON_CACHE_DIR"] == "/there"
    assert seen["target"] == 90
    assert "TRITON_OF_THE_WORKER" not in seen
    assert dict(os.environ) == before
