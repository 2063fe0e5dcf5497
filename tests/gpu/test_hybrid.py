"""The hybrid model, speculation and fingerprints on real CUDA graphs, against runs without graphs."""

import pytest
import torch

from piecewise_backend.cudagraph.fingerprint import StaleMetadata
from piecewise_backend.reasons import ReasonCode
from piecewise_backend.runner import DraftModel, Engine, ModelRunner, PromptLookup, SamplingParams, Speculator
from tests.hybrid import HybridDecoder, all_caches, make_hybrid_runner, random_steps
from tests.piecewise_backend.runner.doubles import AllocatesAtRunTime, SingleTokenOnly, install, tiny
from tests.tiny import VOCAB, TinyDecoder, make_runner, oracle_greedy, work

pytestmark = pytest.mark.gpu
MODES = ["PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
CUDA = {"device": "cuda", "recorder": "cuda", "compiler": "inductor"}


@pytest.fixture(scope="module")
def without_graphs() -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
    runner = make_hybrid_runner("NONE", num_blocks=12, **CUDA)
    return random_steps(runner, 300), all_caches(runner)


@pytest.mark.parametrize("mode", MODES)
def test_random_steps_of_the_hybrid_model_equal_a_run_without_graphs(
    mode: str, without_graphs: tuple[dict[str, list[int]], dict[str, torch.Tensor]]
) -> None:
    tokens, caches = without_graphs
    runner = make_hybrid_runner(mode, num_blocks=12, **CUDA)
    assert random_steps(runner, 300) == tokens
    for name, cache in all_caches(runner).items():
        torch.testing.assert_close(cache, caches[name], atol=2e-4, rtol=2e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert runner.report.num_replays > 100
    assert ReasonCode.CAPTURE_FAILED not in runner.report.reasons.codes()
    assert ReasonCode.PREEMPTED in runner.report.reasons.codes()


def serve(runner: ModelRunner, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    engine = Engine(runner, vocab_size=VOCAB)
    tokens: dict[str, list[int]] = {engine.add(p, SamplingParams(max_tokens=max_tokens)): [] for p in prompts}
    while engine.has_work:
        for token in engine.step():
            tokens[token.request_id].append(token.token_id)
    return list(tokens.values())


PROMPTS = [[5], [1, 2, 3, 1, 2, 3, 1, 2], list(range(40)), [7] * 20, [3, 1, 4, 1, 5, 9, 2, 6]]


def speculator(name: str, model: torch.nn.Module) -> Speculator:
    return PromptLookup(3) if name == "lookup" else DraftModel(type(model)(), 3)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("name", ["lookup", "itself"])
def test_guessing_ahead_gives_the_tokens_of_plain_greedy(name: str, mode: str) -> None:
    model = TinyDecoder()
    runner = make_runner(mode, model=model, speculator=speculator(name, model), **CUDA)
    assert serve(runner, PROMPTS, 16) == [oracle_greedy(model, p, 16) for p in PROMPTS]
    assert (runner.report.speculation.acceptance_rate == 1) == (name == "itself")
    if name == "itself" and mode != "NONE":
        assert runner.report.draft.num_replays > 0


@pytest.mark.parametrize("name", ["lookup", "itself"])
def test_rejected_guesses_leave_no_trace_in_any_state(name: str) -> None:
    plain = serve(make_hybrid_runner("NONE", **CUDA), PROMPTS, 14)
    guessing = make_hybrid_runner("FULL_AND_PIECEWISE", speculator=speculator(name, HybridDecoder()), **CUDA)
    assert serve(guessing, PROMPTS, 14) == plain


def test_one_weak_backend_breaks_at_its_own_operators_only(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, SingleTokenOnly, device="cuda")
    model = tiny(6, windows=(2, 4))
    runner = make_runner(model=model, speculator=PromptLookup(3), capture_sizes=[8], **CUDA)
    graphs = {s.descriptor.split(",")[0]: s.num_graphs for s in runner.report.sizes}
    assert graphs == {"PIECEWISE mixed": 7, "PIECEWISE decode x4": 3}
    assert serve(runner, PROMPTS, 8) == [oracle_greedy(model, p, 8) for p in PROMPTS]


def test_metadata_that_moved_is_caught_before_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, AllocatesAtRunTime, device="cuda")
    runner = make_runner("FULL", model=tiny(), capture_sizes=[8], **CUDA)
    with pytest.raises(StaleMetadata, match=r"'seq_lens' of layer 'layers.1.attention'"):
        runner.execute([work("a", [1, 2, 3], 0, [0])])
