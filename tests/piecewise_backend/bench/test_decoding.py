"""Timing decode steps of language models."""

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.shapes import build
from piecewise_backend.bench.contenders import all_right
from piecewise_backend.bench.decoding import DecodeSettings, bench_decoding
from piecewise_backend.bench.engine_loop import EngineLoop
from piecewise_backend.bench.models import both_forms
from tests.tiny import VOCAB, TinyDecoder

CPU = torch.device("cpu")


def settings(recorder: str | None = None, vocab_size: int | None = None) -> DecodeSettings:
    return DecodeSettings(
        device=CPU,
        batches=(1, 3),
        context=20,
        steps=2,
        rounds=2,
        warmup=1,
        chunk=64,
        recorder=recorder,
        vocab_size=vocab_size,
        options={"compiler": "eager", "cache": False},
    )


def test_loops_and_engine_decode_the_same_model_side_by_side() -> None:
    plain, paged = both_forms(build("tiny", CPU))
    assert plain.config._attn_implementation == "sdpa"
    cases = bench_decoding(plain, paged, ["eager", "NONE", "FULL"], settings("emulated"))
    assert list(cases) == ["batch 1", "batch 3"]
    for records in cases.values():
        assert all_right(records)
        assert records["eager"]["median_ms"] > 0
        assert records["mrv2 NONE"]["median_ms"] > 0
        assert "median_ms" not in records["mrv2 FULL"]
        assert records["mrv2 FULL"]["facts"]["replays"] > 0


def test_a_wrong_decoder_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = EngineLoop.forced_logits
    monkeypatch.setattr(EngineLoop, "forced_logits", lambda self, *args: right(self, *args).roll(1, dims=-1))
    records = bench_decoding(*both_forms(build("tiny", CPU)), ["eager", "NONE"], settings())["batch 1"]
    assert not records["mrv2 NONE"]["check"]["passed"]
    assert "median_ms" not in records["mrv2 NONE"]
    assert "median_ms" in records["eager"]
    assert not all_right(records)


def test_a_model_of_attention_layers_is_compared_with_its_own_mode_none() -> None:
    plain, paged = both_forms(TinyDecoder())
    assert plain is None
    records = bench_decoding(None, paged, ["NONE", "PIECEWISE", "inductor"], settings("emulated", VOCAB))["batch 3"]
    assert records["mrv2 NONE"]["median_ms"] > 0
    assert records["mrv2 PIECEWISE"]["check"]["passed"]
    assert "runner's caches only" in records["inductor"]["skipped"]
