"""A runner whose program was read from disk serves as the one that traced it, in every mode and for every model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from attention.huggingface import PagedCausalLM, first_layers
from piecewise_backend.compile import forget_compiled_pieces
from piecewise_backend.runner import DraftModel, Engine, ModelRunner, SamplingParams, Speculator
from tests.hybrid import HybridDecoder
from tests.tiny import VOCAB, make_runner

PROMPTS = ([1, 2, 3, 4, 5], [7] * 11, [9])


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pieces are compiled once for all tests of this module."""
    return tmp_path_factory.mktemp("cache")


def _hugging_face(kind: str) -> PagedCausalLM:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {"head_dim": 16} if kind == "Qwen3" else {}
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        **settings,
    )
    return PagedCausalLM(getattr(transformers, f"{kind}ForCausalLM")(config))


def _start(model: nn.Module, mode: str, cache_dir: Path, speculator: Speculator | None = None) -> ModelRunner:
    torch._dynamo.reset()
    forget_compiled_pieces()
    settings = {"compiler": "inductor", "cache": True, "cache_dir": cache_dir, "capture_sizes": [2, 8, 32]}
    return make_runner(mode, model=model, speculator=speculator, **settings)


def _tokens(runner: ModelRunner) -> list[list[int]]:
    engine = Engine(runner, vocab_size=VOCAB)
    found: dict[str, list[int]] = {engine.add(prompt, SamplingParams(max_tokens=6)): [] for prompt in PROMPTS}
    while engine.has_work:
        for token in engine.step():
            found[token.request_id].append(token.token_id)
    return list(found.values())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "hybrid": HybridDecoder,
    "Llama": lambda: _hugging_face("Llama"),
    "Qwen3": lambda: _hugging_face("Qwen3"),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_a_warm_start_gives_the_tokens_of_the_cold_one_in_every_mode(
    make: Callable[[], nn.Module], cache_dir: Path
) -> None:
    cold = _start(make(), "NONE", cache_dir)
    assert cold.report.program_source == "traced"
    expected = _tokens(cold)
    for mode in ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"):
        warm = _start(make(), mode, cache_dir)
        assert warm.report.program_source == "disk", [str(reason) for reason, _ in warm.report.reasons]
        assert _tokens(warm) == expected, mode
        if mode != "NONE":
            assert warm.report.num_replays > 0
    assert [step.layer for step in warm.bound.program.steps] == [step.layer for step in cold.bound.program.steps]


def test_a_draft_model_and_its_target_are_both_read_from_disk(cache_dir: Path) -> None:
    shutil.rmtree(cache_dir / "programs", ignore_errors=True)
    results = []
    for source in ("traced", "disk"):
        model = _hugging_face("Llama")
        runner = _start(model, "FULL_AND_PIECEWISE", cache_dir, DraftModel(first_layers(model, 1), 2))
        assert runner.report.draft is not None
        assert (runner.report.program_source, runner.report.draft.program_source) == (source, source)
        results.append(_tokens(runner))
    assert results[0] == results[1]
