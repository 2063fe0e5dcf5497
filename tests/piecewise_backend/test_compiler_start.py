"""What the compiler waits for once in a process is begun at a start and waited for before compiling."""

import logging
import threading

import pytest
import torch

from piecewise_backend import compiler_start

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that computed Triton's digest, in a process that has not begun to."""
    found: list[str] = []
    monkeypatch.setattr(compiler_start, "_preparation", None)
    monkeypatch.setattr(compiler_start, "_digest_triton", lambda: found.append(threading.current_thread().name))
    return found


def test_a_second_start_prepares_nothing_again(digests: list[str]) -> None:
    for _ in range(2):
        compiler_start.prepare_compiler("inductor", CUDA)
    compiler_start.wait_until_prepared()
    assert digests == ["mrv2 compiler"]


@pytest.mark.parametrize(("compiler", "device"), [("eager", CUDA), ("inductor", CPU)])
def test_where_triton_is_not_used_nothing_is_prepared(compiler: str, device: torch.device, digests: list[str]) -> None:
    compiler_start.prepare_compiler(compiler, device)
    compiler_start.wait_until_prepared()
    assert digests == []


def test_waiting_ends_when_the_digest_is_there(digests: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, order = threading.Event(), list[str]()

    def digest() -> None:
        assert may_end.wait(10)
        order.append("digest")

    monkeypatch.setattr(compiler_start, "_digest_triton", digest)
    compiler_start.prepare_compiler("inductor", CUDA)
    threading.Timer(0.05, may_end.set).start()
    compiler_start.wait_until_prepared()
    order.append("compile")
    assert order == ["digest", "compile"]


def test_a_digest_that_fails_is_left_to_the_compiler_to_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", fail)
    monkeypatch.setattr(compiler_start, "_preparation", None)
    with caplog.at_level(logging.INFO, logger=compiler_start.__name__):
        compiler_start.prepare_compiler("inductor", CUDA)
        compiler_start.wait_until_prepared()
    assert "Triton is not ready: RuntimeError: no C compiler" in caplog.text
