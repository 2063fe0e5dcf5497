"""What every test gets: its share of the cores, a seed, a fresh Dynamo; and no GPU test without a GPU."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))  # read when triton loads
import torch._dynamo


def pytest_configure() -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(1, (os.cpu_count() or 1) // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # for child processes: README code, the demo


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU; torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh_torch() -> None:
    """Each test starts from the same seed and owes nothing to what an earlier test compiled."""
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def artifact_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which the packages keep compiled artifacts for the length of one test."""
    monkeypatch.setenv("MRV2_CACHE_DIR", str(tmp_path))
    return tmp_path
