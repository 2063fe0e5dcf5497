"""Guessing ahead changes how many tokens a step gives, and nothing else."""

import pytest
import torch
from torch import nn

from attention.backends.pytorch import TorchMetadataBuilder
from piecewise_backend.cudagraph.modes import CUDAGraphMode
from piecewise_backend.reasons import ReasonCode
from piecewise_backend.runner import DraftModel, Engine, PromptLookup, Request, SamplingParams, Speculator
from tests.tiny import HIDDEN, VOCAB, TinyDecoder, make_runner, oracle_greedy, serve_at_random, work

MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
PROMPTS = [[5], [1, 2, 3, 1, 2, 3, 1, 2], list(range(40)), [7] * 20, [3, 1, 4, 1, 5, 9, 2, 6], [11, 12]]


def first_layers(model: TinyDecoder, count: int = 1) -> TinyDecoder:
    """A draft model of the model's own first layers."""
    draft = TinyDecoder(num_layers=count)
    draft.load_state_dict(model.state_dict(), strict=False)
    return draft


def speculators(model: TinyDecoder, k: int = 3) -> dict[str, Speculator]:
    return {"lookup": PromptLookup(k), "draft": DraftModel(first_layers(model), k), "itself": DraftModel(model, k)}


def serve(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    tokens: dict[str, list[int]] = {engine.add(p, params): [] for p in prompts}
    while engine.has_work:
        for token in engine.step():
            tokens[token.request_id].append(token.token_id)
    return list(tokens.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["lookup", "draft"])
def test_greedy_tokens_are_those_of_plain_greedy(name: str, mode: str) -> None:
    model = TinyDecoder()
    engine = Engine(make_runner(mode, model=model, speculator=speculators(model)[name]), vocab_size=VOCAB)
    tokens = serve(engine, PROMPTS, SamplingParams(max_tokens=12))
    assert tokens == [oracle_greedy(model, p, 12) for p in PROMPTS]
    assert engine.runner.report.speculation.proposed > 0


@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_draft_model_that_is_the_model_itself_is_always_right(k: int) -> None:
    model = TinyDecoder()
    engine = Engine(make_runner(model=model, speculator=DraftModel(TinyDecoder(), k)), vocab_size=VOCAB)
    assert serve(engine, PROMPTS, SamplingParams(max_tokens=24)) == [oracle_greedy(model, p, 24) for p in PROMPTS]
    report = engine.runner.report
    assert report.speculation.acceptance_rate == 1
    assert f"({1:.0%})" in str(report)
    assert report.draft.num_replays > 0


@pytest.mark.parametrize("name", ["lookup", "draft"])
def test_requests_that_come_and_go_and_are_preempted_get_the_tokens_they_get_alone(name: str) -> None:
    model = TinyDecoder()
    engine = Engine(make_runner(model=model, speculator=speculators(model)[name], num_blocks=8), vocab_size=VOCAB)
    serve_at_random(engine, model)
    assert ReasonCode.PREEMPTED in engine.runner.report.reasons.codes()


def test_a_decode_step_is_one_graph_of_one_plus_k_tokens_a_request_and_guessing_another() -> None:
    model = TinyDecoder()
    runner = make_runner(model=model, speculator=DraftModel(first_layers(model), 3))
    serve(Engine(runner, vocab_size=VOCAB), [[1, 2, 3]], SamplingParams(max_tokens=12))
    used = {s.descriptor: s for s in runner.report.sizes if s.replays}
    assert any(name.startswith("FULL decode x4") and s.num_graphs == 1 for name, s in used.items())
    drafts = {s.descriptor: s for s in runner.report.draft.sizes if s.replays}
    assert any(name.startswith("FULL decode x1") and s.num_graphs == 1 for name, s in drafts.items())
    assert any(name.startswith("FULL decode x2") for name in drafts), "catching up has graphs of its own"


def test_a_draft_model_whose_metadata_is_planned_on_the_host_guesses_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TorchMetadataBuilder, "advances_on_device", False)
    model = TinyDecoder()
    speculator = DraftModel(first_layers(model), 4)
    engine = Engine(make_runner(model=model, speculator=speculator), vocab_size=VOCAB)
    assert not speculator.loop.on_device
    assert serve(engine, PROMPTS, SamplingParams(max_tokens=8)) == [oracle_greedy(model, p, 8) for p in PROMPTS]


def test_a_sequence_near_the_longest_goes_on_without_guesses() -> None:
    model = TinyDecoder()
    speculator = speculators(model)["itself"]
    engine = Engine(make_runner(model=model, speculator=speculator, max_model_len=40), vocab_size=VOCAB)
    tokens = serve(engine, [[1] * 20], SamplingParams(max_tokens=99))
    assert tokens == [oracle_greedy(model, [1] * 20, 20)]


def test_tokens_after_a_stop_token_are_dropped_even_if_they_were_accepted() -> None:
    model = TinyDecoder()
    expected = oracle_greedy(model, [1, 2, 3], 12)
    stop = expected[5]
    engine = Engine(make_runner(model=model, speculator=DraftModel(TinyDecoder(), 3)), vocab_size=VOCAB)
    (tokens,) = serve(engine, [[1, 2, 3]], SamplingParams(max_tokens=12, stop_token_ids=(stop,)))
    assert tokens == expected[: expected.index(stop) + 1]


def test_sampled_tokens_keep_their_distribution() -> None:
    """Next tokens of one prompt, with a draft model and without: shares of the likeliest tokens agree."""
    model = TinyDecoder()
    prompts = [[1, 2, 3]] * 600
    params = SamplingParams(max_tokens=2, temperature=0.5)
    plain = Engine(make_runner("NONE", model=TinyDecoder()), vocab_size=VOCAB)
    guessing = Engine(make_runner("NONE", model=model, speculator=DraftModel(first_layers(model), 2)), vocab_size=VOCAB)
    counts = [torch.bincount(torch.tensor(serve(e, prompts, params))[:, 1], minlength=VOCAB) for e in (plain, guessing)]
    torch.testing.assert_close(counts[0] / 600, counts[1] / 600, atol=0.09, rtol=0)


def request(tokens: list[int]) -> Request:
    return Request("a", tuple(tokens), SamplingParams())


@pytest.mark.parametrize(
    ("tokens", "guesses"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),
        ([5, 6, 7, 6, 8, 6], [8, 6, 6]),  # the latest occurrence; too little follows
        ([1, 2, 3, 4], [4, 4, 4]),
        ([7], [7, 7, 7]),
    ],
)
def test_prompt_lookup_guesses_what_followed_last_time(tokens: list[int], guesses: list[int]) -> None:
    assert PromptLookup(3).propose([request(tokens)]) == [guesses]


@pytest.mark.parametrize("wrong", [lambda: PromptLookup(0), lambda: PromptLookup(2, max_ngram=0)])
def test_impossible_settings_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        wrong()


def test_a_prefill_of_as_many_tokens_as_a_decode_step_is_not_taken_for_one() -> None:
    """R25: k = 3, and a request still in prefill with exactly 4 tokens left."""
    runner = make_runner(model=TinyDecoder(), speculator=PromptLookup(3))
    runner.execute([work("a", [1, 2, 3, 4], 0, [0])])
    used = [s.descriptor for s in runner.report.sizes if s.replays]
    assert len(used) == 1
    assert used[0].startswith("PIECEWISE mixed")


def test_every_captured_variant_is_reached_by_some_batch() -> None:
    """R26: with k = 3."""
    runner = make_runner(model=TinyDecoder(), speculator=PromptLookup(3))
    reached = {runner.manager.dispatch(n, min(n, 6), None) for n in range(1, 33)}
    reached |= {runner.manager.dispatch(4 * n, n, 4) for n in range(1, 7)}
    assert set(runner.manager.captured) == reached
    assert {d.mode for d in reached} == {CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE}


@pytest.mark.parametrize("k", [1, 3])
def test_every_guess_is_what_the_draft_model_says_of_the_tokens_so_far(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after guesses were rejected, all were accepted, or the request was preempted."""
    model = TinyDecoder()
    draft = first_layers(model, 2)
    seen: list[tuple[list[int], list[int]]] = []
    propose = DraftModel.propose

    def noting(self: DraftModel, requests: list[Request]) -> list[list[int]]:
        guesses = propose(self, requests)
        seen.extend((list(r.tokens(0, r.num_tokens)), g) for r, g in zip(requests, guesses, strict=True))
        return guesses

    monkeypatch.setattr(DraftModel, "propose", noting)
    engine = Engine(make_runner(model=model, speculator=DraftModel(draft, k), num_blocks=8), vocab_size=VOCAB)
    serve_at_random(engine, model, steps=60)
    report = engine.runner.report
    assert ReasonCode.PREEMPTED in report.reasons.codes()
    assert 0 < report.speculation.acceptance_rate < 1
    for tokens, guesses in seen:
        assert guesses == oracle_greedy(draft, tokens, k)


def test_tokens_that_nobody_guessed_are_run_before_the_next_guess() -> None:
    """A loop of one's own may go on for several tokens without asking: what is cached is then as if all were new."""
    model = TinyDecoder()
    speculator, forgetful = (DraftModel(first_layers(model, 2), 3) for _ in range(2))
    for each in (speculator, forgetful):
        make_runner(model=model, speculator=each)
    asked = Request("a", (1, 2, 3, 4), SamplingParams(), block_ids=[5, 0, 2], state_slot=1)
    for new in ([9], [7, 7, 50], [3], [60, 61]):
        asked.output_ids += new
        forgetful.forget(asked)
        assert speculator.propose([asked]) == forgetful.propose([asked])
        for name, layer in speculator.runner.layers.items():
            cached, expected = (
                c[5, :, : asked.num_tokens] for c in (layer.kv_cache, forgetful.runner.layers[name].kv_cache)
            )
            torch.testing.assert_close(cached, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("draft_vocab", [20, VOCAB + 200])
def test_a_draft_of_another_vocabulary_guesses_what_both_know(draft_vocab: int) -> None:
    model, draft = TinyDecoder(), TinyDecoder(seed=1)
    draft.embed, draft.head = nn.Embedding(draft_vocab, HIDDEN), nn.Linear(HIDDEN, draft_vocab, bias=False)
    engine = Engine(make_runner(model=model, speculator=DraftModel(draft, 3)), vocab_size=VOCAB)
    prompts = [[1, 2, 3], [50, 4, 60], [7] * 5, [96]]
    ids = [engine.add(p, SamplingParams(max_tokens=10)) for p in prompts]
    tokens: dict[str, list[int]] = {i: [] for i in ids}
    while engine.has_work:
        for token in engine.step():
            tokens[token.request_id].append(token.token_id)
    assert [tokens[i] for i in ids] == [oracle_greedy(model, p, 10) for p in prompts]
    reasons = {reason.code: str(reason) for reason, _ in engine.runner.report.reasons}
    assert f"has {draft_vocab} tokens, the model it guesses for {VOCAB}" in reasons[ReasonCode.VOCABULARIES_DIFFER]
