"""The benchmarks themselves, on a tiny model on the CPU: outputs are checked first, and a wrong one gets no figure."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import capture, decode, floor, plot, prefill, startup
from benchmarks.contenders import Name, names
from benchmarks.floor import kv_bytes_per_token, weight_bytes
from benchmarks.shapes import build, on_meta
from piecewise_backend.bench.engine_loop import EngineLoop
from piecewise_backend.bench.logits import compare
from piecewise_backend.bench.transformers_loop import CompiledLoop, EagerLoop

CPU = torch.device("cpu")
SMALL = ["--shape", "tiny", "--compiler", "eager"]
DECODE = [*SMALL, "--backends", "torch", "--context", "48", "--steps", "6", "--warmup", "2", "--chunk", "64"]
PREFILL = [*SMALL, "--backends", "torch", "--cases", "4x8", "2x40", "--capture-sizes", "32", "--repeats", "2"]
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"]


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch, artifact_dir: Path) -> Iterator[None]:
    """Copy rates and compiled code that cost nothing."""
    for module in (decode, floor):
        monkeypatch.setattr(module, "copy_rate", lambda device: 1e10)
    monkeypatch.setattr(CompiledLoop, "backend", "eager")
    yield
    torch.compiler.reset()


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def test_decoding_is_checked_timed_and_compared_with_the_floor_and_with_eager(tmp_path: Path) -> None:
    contenders = ["eager", "reduce-overhead", *MODES, "vllm"]
    options = ["--batches", "1", "3", "--contenders", *contenders, "--profile", str(tmp_path)]
    assert decode.main([*DECODE, *options, "--out", str(tmp_path)]) == 0
    record = read(tmp_path, "decode_tiny")
    assert record["floor_ms"].keys() == {"1", "3"}
    assert "not importable" in record["contenders"].pop("vllm")["skipped"]
    assert list(record["contenders"]) == ["eager", "reduce-overhead", *(f"{mode} torch" for mode in MODES)]
    for found in record["contenders"].values():
        for batch in ("1", "3"):
            figures = found["batches"][batch]
            assert figures["check"]["passed"]
            assert figures["ratio_to_floor"] == figures["ms_per_token"] / record["floor_ms"][batch]
            assert figures["speed_up_over_eager"] > 0
            assert figures["host_p90_ms"] >= figures["host_median_ms"]
    graphs = {mode: record["contenders"][f"{mode} torch"]["batches"]["3"] for mode in MODES}
    assert graphs["NONE"]["runs_without_graphs"] == graphs["FULL"]["replays"] == graphs["PIECEWISE"]["replays"] == 6
    assert "| FULL torch |" in (tmp_path / "decode_tiny.md").read_text()
    kernels = read(tmp_path, "kernels_tiny_FULL_torch_batch3")["kernels"]
    assert sum(row["share"] for row in kernels) == pytest.approx(1)
    assert plot.main([str(tmp_path / "decode_tiny.json")]) == 0
    assert (tmp_path / "decode_tiny.png").stat().st_size > 1000


@pytest.mark.parametrize(("contender", "name"), [(EagerLoop, "eager"), (EngineLoop, "FULL torch")])
def test_a_wrong_decoder_is_recorded_as_wrong_and_gets_no_figure(
    contender: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = contender.forced_logits
    monkeypatch.setattr(contender, "forced_logits", lambda self, *args: right(self, *args).roll(1, dims=0))
    options = ["--batches", "2", "--contenders", "eager", "FULL", "--out", str(tmp_path)]
    assert decode.main([*DECODE, *options]) == 1
    record = read(tmp_path, "decode_tiny")["contenders"]
    wrong = record[name]["batches"]["2"]
    assert not wrong["check"]["passed"]
    assert wrong.keys() == {"check"}
    assert "wrong" in capsys.readouterr().out
    (other,) = record.keys() - {name}
    assert "ratio_to_floor" in record[other]["batches"]["2"]
    assert ("speed_up_over_eager" in record[other]["batches"]["2"]) == (name != "eager")


def test_a_decoder_that_fails_is_recorded_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EagerLoop, "begin", lambda self, *args: 1 / 0)
    options = ["--batches", "1", "--contenders", "eager", "NONE", "--out", str(tmp_path)]
    assert decode.main([*DECODE, *options]) == 1
    record = read(tmp_path, "decode_tiny")["contenders"]
    assert "ZeroDivisionError" in record["eager"]["error"]
    assert record["NONE torch"]["batches"]["1"]["check"]["passed"]


def test_prefill_is_checked_and_timed(tmp_path: Path) -> None:
    options = ["--contenders", "eager", "inductor", "FULL", "FULL_AND_PIECEWISE", "--out", str(tmp_path)]
    assert prefill.main([*PREFILL, *options]) == 0
    record = read(tmp_path, "prefill_tiny")["contenders"]
    assert list(record) == ["eager", "inductor", "FULL torch", "FULL_AND_PIECEWISE torch"]
    for found in record.values():
        for case in ("4x8", "2x40"):
            assert found["cases"][case]["check"]["passed"]
            assert found["cases"][case]["speed_up_over_eager"] > 0
    assert record["FULL torch"]["cases"]["4x8"]["replays"] > 0
    assert record["FULL torch"]["cases"]["2x40"]["runs_without_graphs"] > 0


def test_a_wrong_prefill_is_recorded_as_wrong_and_gets_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = EngineLoop.prefill_step
    monkeypatch.setattr(EngineLoop, "prefill_step", lambda self, prompts: right(self, prompts.flip(0)))
    assert prefill.main([*PREFILL, "--contenders", "eager", "NONE", "--out", str(tmp_path)]) == 1
    record = read(tmp_path, "prefill_tiny")["contenders"]
    assert {"median_ms", "speed_up_over_eager"}.isdisjoint(record["NONE torch"]["cases"]["4x8"])
    assert "| NONE torch | wrong | wrong |" in (tmp_path / "prefill_tiny.md").read_text()


def test_captures_are_counted_for_each_kind_of_batch(tmp_path: Path) -> None:
    options = ["--capture-sizes", "1", "8", "16", "--largest", "16", "--out", str(tmp_path)]
    assert capture.main([*SMALL, *options]) == 0
    record = read(tmp_path, "capture_tiny")
    assert {kind: found["sizes"] for kind, found in record["kinds"].items()} == {
        "PIECEWISE mixed": 3,
        "FULL decode x1": 3,
    }
    assert len(record["sizes"]) == 6
    assert all(check["passed"] for check in record["check"].values())


def test_a_start_is_split_into_phases_that_sum_up(tmp_path: Path) -> None:
    options = ["--capture-sizes", "1", "8", "--largest", "8", "--out", str(tmp_path)]
    assert startup.main([*SMALL, *options]) == 0
    record = read(tmp_path, "startup_tiny")
    for found in record["starts"].values():
        assert found["check"]["passed"]
        assert sum(found["phases"].values()) == pytest.approx(found["seconds"], abs=0.01)
        assert found["phases"]["trace"] > 0
    assert record["warm_over_cold"] > 0


def test_the_floor_counts_each_weight_that_is_read_and_the_cache(tmp_path: Path) -> None:
    assert floor.main(["--shapes", "tiny", "--batches", "1", "2", "--out", str(tmp_path)]) == 0
    floors = read(tmp_path, "floor")["shapes"]["tiny"]
    assert floors["2"] > floors["1"]
    tied, untied = on_meta("qwen3-0.6b", torch.bfloat16), on_meta("llama-3.1-8b", torch.bfloat16)
    assert weight_bytes(tied) == 2 * 596_049_920
    assert weight_bytes(untied) == 2 * (8_030_261_248 - 128256 * 4096)
    assert kv_bytes_per_token(untied.config, torch.bfloat16) == 2 * 32 * 8 * 128 * 2


def test_a_model_is_the_same_for_the_same_seed_and_has_all_its_buffers() -> None:
    ids = torch.arange(20)[None]
    first, again, other = build("tiny", CPU), build("tiny", CPU), build("tiny", CPU, seed=1)
    torch.testing.assert_close(first(ids).logits, again(ids).logits, rtol=0, atol=0)
    assert not torch.allclose(first(ids).logits, other(ids).logits)
    plain = type(first)(first.config)  # as transformers makes it
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(first.get_buffer(name), buffer)


def test_logits_are_compared_row_by_row() -> None:
    expected = torch.randn(2, 3, 50)
    assert compare(expected * (1 + 1e-5), expected)["passed"]
    one_row = expected.clone()
    one_row[1, 2] += 0.1
    assert not compare(one_row, expected)["passed"]
    one_row[1, 2, 0] = float("nan")
    assert not compare(one_row, expected)["passed"]
    assert "shape" in compare(expected[:1], expected)["why"]


def test_plain_contenders_come_before_the_engine_changes_the_model() -> None:
    found = names(["FULL", "eager", "NONE"], ["torch", "triton"])
    assert [str(name) for name in found] == ["eager", "NONE torch", "FULL torch", "NONE triton", "FULL triton"]
    assert found[1] == Name(what="NONE", backend="torch")
