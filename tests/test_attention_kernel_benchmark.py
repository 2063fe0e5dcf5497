"""The attention kernel's benchmark, tried out in Triton's interpreter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("attention.backends.triton.backend", exc_type=ImportError)

from benchmarks import attention_kernel
from benchmarks.attention_kernel import INTERPRETED, Bench, Case, Config, main

pytestmark = pytest.mark.skipif(not INTERPRETED or torch.cuda.is_available(), reason="tried out in the interpreter")

TINY = ["--shapes", "tiny", "--context", "100", "--calls", "2", "--repeats", "2", "--max-model-len", "256"]


def rows(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "attention_kernel.json").read_text())["rows"]


def test_kernels_are_checked_and_timed_as_planned(tmp_path: Path) -> None:
    assert main([*TINY, "--batches", "1", "3", "--prefill", "2x20", "--out", str(tmp_path)]) == 0
    found = rows(tmp_path)
    assert [row["case"] for row in found] == [
        "tiny 1 x decode of 100",
        "tiny 3 x decode of 100",
        "tiny 2 x prefill of 20",
    ]
    for row in found:
        assert row["us"] > 0
        assert row["share_of_rate"] == row["gb_per_s"] / 4200


def test_each_config_replaces_the_plan(tmp_path: Path) -> None:
    configs = ["32,4,2,0", "16,2,3,5", "64,4,2,1"]
    assert main([*TINY, "--batches", "2", "--prefill", "--configs", *configs, "--out", str(tmp_path)]) == 0
    assert [row["config"] for row in rows(tmp_path)][1:] == configs[1:]
    assert [row["tile"]["block_n"] for row in rows(tmp_path)] == [32, 16, 64]


def test_a_wrong_kernel_gets_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel.Bench, "_dense", lambda self: self.query.float())
    assert main([*TINY, "--batches", "1", "--prefill", "--out", str(tmp_path)]) == 1
    assert "us" not in rows(tmp_path)[0]


def test_work_is_what_one_call_must_move_and_compute() -> None:
    case = Case(shape="llama-3.1-8b", num_reqs=2, query_len=1, seq_len=10)
    moved = 2 * (2 * 2 * 10 * 8 * 128 + 2 * 2 * 32 * 128)
    assert case.work(case.spec(torch.bfloat16)) == (moved, 2 * 10 * 32 * 128 * 4)
    prefill = Case(shape="tiny", num_reqs=1, query_len=3, seq_len=3)
    assert prefill.work(prefill.spec(torch.float16))[1] == 4 * (1 + 2 + 3) * 4 * 64


def test_a_config_asks_for_splits_however_short_they_are() -> None:
    bench = Bench(Case(shape="tiny", num_reqs=1, query_len=1, seq_len=100), torch.device("cpu"), calls=1)
    metadata = bench.metadata(Config.parse("16,4,2,7"), 128)
    assert bench.check(metadata) is not None
    assert (~metadata.partial_lse.isnan()).view(4, 7)[:, -1].all()
