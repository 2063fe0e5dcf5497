"""What of the FlashInfer backend needs neither FlashInfer nor a GPU that it runs on."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

from attention.backends.flashinfer import FlashInferBackend
from attention.backends.flashinfer import backend as backend_module
from attention.backends.flashinfer.kernels import fill_page_table, gather_page_indices
from attention.backends.flashinfer.workspace import plan_bytes, split_bytes
from attention.registry import available_backends, choose_backend, get_backend
from attention.specs import AttentionSpec

CUDA = torch.device("cuda")

# Triton's interpreter is on exactly where there is no GPU.
KERNEL_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, block_size=16, dtype=torch.bfloat16, scale=0.1)


@pytest.fixture
def capable_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Hopper GPU, as far as PyTorch tells."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(backend_module, "unsupported_device", lambda device: None)
    monkeypatch.setattr(backend_module, "library", lambda: None)


def test_importing_the_backend_does_not_import_the_library() -> None:
    code = "import sys, attention.backends.flashinfer; assert 'flashinfer' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_registered_and_not_preferred() -> None:
    assert "flashinfer" in available_backends()
    assert get_backend("flashinfer") is FlashInferBackend
    assert choose_backend(dataclasses.replace(SPEC, dtype=torch.float32), torch.device("cpu")).backend.name == "torch"


def test_the_cpu_is_refused() -> None:
    assert FlashInferBackend.unsupported_reason(SPEC, torch.device("cpu")) == (
        "its kernels run on CUDA devices, not on 'cpu'"
    )
    with pytest.raises(ValueError, match="'flashinfer' cannot run this model: its kernels run on CUDA devices"):
        choose_backend(SPEC, torch.device("cpu"), forced="flashinfer")


@pytest.mark.usefixtures("capable_machine")
@pytest.mark.parametrize(
    "change",
    [{}, {"head_size": 64}, {"head_size": 256, "dtype": torch.float16}, {"sliding_window": 1, "soft_cap": 30.0}],
    ids=str,
)
def test_what_the_library_runs_is_accepted(change: dict[str, Any]) -> None:
    assert FlashInferBackend.unsupported_reason(dataclasses.replace(SPEC, **change), CUDA) is None


@pytest.mark.usefixtures("capable_machine")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "dtype torch.float32 is not one of ['torch.float16', 'torch.bfloat16']"),
        ({"head_size": 80}, "head_size must be one of [64, 128, 256], got 80"),
    ],
)
def test_what_the_library_does_not_run_is_refused(change: dict[str, Any], reason: str) -> None:
    assert FlashInferBackend.unsupported_reason(dataclasses.replace(SPEC, **change), CUDA) == reason


@pytest.mark.usefixtures("capable_machine")
def test_a_machine_without_the_library_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'flashinfer'")

    monkeypatch.setattr(backend_module, "library", missing)
    reason = FlashInferBackend.unsupported_reason(SPEC, CUDA)
    assert reason == ("the library is not importable here: No module named 'flashinfer'; pip install flashinfer-python")


@pytest.mark.usefixtures("capable_machine")
def test_a_machine_without_a_fit_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert FlashInferBackend.unsupported_reason(SPEC, CUDA) == "its kernels need compute capability 8.0, got 7.5"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert FlashInferBackend.unsupported_reason(SPEC, CUDA) == "PyTorch finds no CUDA device here"


LENGTHS = {
    "one": [33],
    "edges": [1, 15, 16, 17, 32, 33],
    "padded": [40, 1, 0, 0],
    "empty in the midst": [5, 0, 64, 0, 16],
    "more requests than a program counts at a time": [(7 * r) % 50 for r in range(1100)],
}


@pytest.mark.parametrize("seq_lens", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("block_size", [16, 32])
def test_page_indices_are_those_of_a_loop(seq_lens: list[int], block_size: int) -> None:
    blocks_per_request = 6
    table = torch.full((len(seq_lens), blocks_per_request), 1 << 30, dtype=torch.int32)
    expected: list[int] = []
    indptr, last = [0], []
    for request, seq_len in enumerate(seq_lens):
        pages = max(1, -(-seq_len // block_size))
        if seq_len:
            table[request, :pages] = torch.randint(1, 1000, (pages,), dtype=torch.int32)
            expected += table[request, :pages].tolist()
        else:
            expected.append(0)
        indptr.append(len(expected))
        last.append(max(1, seq_len) - (pages - 1) * block_size)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)

    found = torch.full((len(expected) + 9,), -7, dtype=torch.int32, device=KERNEL_DEVICE)
    gather_page_indices(lengths.to(KERNEL_DEVICE), table.to(KERNEL_DEVICE), block_size, found)
    assert found.tolist() == expected + [-7] * 9

    page_indptr, last_page_len = torch.empty(len(seq_lens) + 1, dtype=torch.int32), torch.empty_like(lengths)
    fill_page_table(lengths, block_size, page_indptr, last_page_len)
    assert page_indptr.tolist() == indptr
    assert last_page_len.tolist() == last
    assert min(last) >= 1
    assert max(last) <= block_size


def test_page_indices_beyond_what_a_program_takes_at_a_time() -> None:
    table = torch.randint(0, 10_000, (2, 1500), dtype=torch.int32)
    seq_lens = torch.tensor([1400 * 16 - 3, 1], dtype=torch.int32)
    found = torch.full((1403,), -7, dtype=torch.int32, device=KERNEL_DEVICE)
    gather_page_indices(seq_lens.to(KERNEL_DEVICE), table.to(KERNEL_DEVICE), 16, found)
    assert found.tolist() == [*table[0, :1400].tolist(), int(table[1, 0]), -7, -7]


def test_a_padded_table_is_read_by_its_rows() -> None:
    wide = torch.arange(40, dtype=torch.int32).view(4, 10)
    found = torch.empty(8, dtype=torch.int32, device=KERNEL_DEVICE)
    seq_lens = torch.tensor([20, 40, 1, 30], dtype=torch.int32, device=KERNEL_DEVICE)
    gather_page_indices(seq_lens, wide.to(KERNEL_DEVICE)[:, :3], 16, found)
    assert found.tolist() == [0, 1, 10, 11, 12, 20, 30, 31]


def test_the_workspace_covers_what_the_planner_takes() -> None:
    """By hand, for 132 multiprocessors: 33 tiles of 128 rows for each of 8 KV heads, fp32, of 32 heads."""
    per_row = 32 * (128 + 1) * 4
    assert split_bytes(SPEC, num_sms=132) == 33 * 128 * per_row + 64
    decode = split_bytes(SPEC, num_sms=132, num_reqs=16, num_rows=16)
    assert decode == 33 * 16 * per_row + 64, "4 query heads a KV head are a tile of 16"
    mixed = split_bytes(SPEC, num_sms=132, num_reqs=256, num_rows=512)
    assert mixed == (512 * 4 // 128 + 256) * 128 * per_row + 64
    assert plan_bytes(SPEC, num_sms=132, num_reqs=256, num_rows=512) < 1 << 20
