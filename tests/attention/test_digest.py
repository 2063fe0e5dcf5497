"""Triton's digest is begun when a model for a GPU is in sight, and waited for before kernels are looked for by it."""

import logging
import threading

import pytest
import torch

from attention import huggingface
from attention.kernels import digest
from piecewise_backend.compiler_start import prepare_compiler
from tests.attention.test_huggingface import make

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that computed the digest, in a process that has not begun to."""
    found: list[str] = []
    monkeypatch.setattr(digest, "_thread", None)
    monkeypatch.setattr(digest, "_compute", lambda: found.append(threading.current_thread().name))
    return found


def test_it_is_computed_once_by_a_thread_of_its_own(digests: list[str]) -> None:
    digest.begin_digest(CUDA)
    prepare_compiler("inductor", CUDA)
    digest.wait_for_digest()
    assert digests == ["mrv2 digest"]


def test_it_is_begun_when_a_model_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[torch.device] = []
    monkeypatch.setattr(huggingface, "begin_digest", begun.append)
    huggingface.PagedCausalLM(make("Llama"))
    assert begun == [CPU]


@pytest.mark.parametrize(("compiler", "device"), [("eager", CUDA), ("inductor", CPU)])
def test_where_triton_is_not_used_it_is_not_computed(compiler: str, device: torch.device, digests: list[str]) -> None:
    prepare_compiler(compiler, device)
    digest.wait_for_digest()
    assert digests == []


def test_waiting_ends_when_the_digest_is_there(digests: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, order = threading.Event(), list[str]()

    def compute() -> None:
        assert may_end.wait(10)
        order.append("digest")

    monkeypatch.setattr(digest, "_compute", compute)
    digest.begin_digest(CUDA)
    threading.Timer(0.05, may_end.set).start()
    digest.wait_for_digest()
    order.append("compile")
    assert order == ["digest", "compile"]


def test_one_that_fails_is_left_to_the_compiler_to_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", fail)
    monkeypatch.setattr(digest, "_thread", None)
    with caplog.at_level(logging.INFO, logger=digest.__name__):
        digest.begin_digest(CUDA)
        digest.wait_for_digest()
    assert "Triton is not ready: RuntimeError: no C compiler" in caplog.text
