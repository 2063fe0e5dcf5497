"""A model with every kind of layer that keeps caches: graphs change neither a token nor a byte of any cache."""

from typing import Any

import pytest
import torch

from attention.backends.linear_attention import LinearAttentionMetadataBuilder
from attention.backends.short_conv import ShortConvMetadataBuilder
from piecewise_backend.cudagraph.modes import CUDAGraphMode
from piecewise_backend.reasons import ReasonCode
from piecewise_backend.runner import DraftModel, Engine, PromptLookup, SamplingParams
from tests.hybrid import HybridDecoder, all_caches, make_hybrid_runner, random_steps
from tests.tiny import VOCAB, work

MODES = ["PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
STEPS = 300


@pytest.fixture(scope="module")
def without_graphs() -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
    """Tokens and caches of the random steps in mode NONE."""
    runner = make_hybrid_runner("NONE", num_blocks=12)
    tokens = random_steps(runner, STEPS)
    assert ReasonCode.PREEMPTED in runner.report.reasons.codes()
    assert len(tokens) > 30
    return tokens, all_caches(runner)


@pytest.mark.parametrize("mode", MODES)
def test_random_steps_give_the_tokens_and_all_cache_bytes_of_a_run_without_graphs(
    mode: str, without_graphs: tuple[dict[str, list[int]], dict[str, torch.Tensor]]
) -> None:
    tokens, caches = without_graphs
    runner = make_hybrid_runner(mode, num_blocks=12)
    assert random_steps(runner, STEPS) == tokens
    for name, cache in all_caches(runner).items():
        assert torch.equal(cache, caches[name]), name
    assert runner.report.num_replays > 100
    assert ReasonCode.CAPTURE_FAILED not in runner.report.reasons.codes()


def test_each_request_gets_the_tokens_that_it_gets_alone() -> None:
    together = Engine(make_hybrid_runner("FULL_AND_PIECEWISE"), vocab_size=VOCAB)
    prompts = [[5], [1, 2, 3], list(range(40)), [7] * 70, [3, 1, 4, 1, 5, 9, 2, 6]]
    params = SamplingParams(max_tokens=12)
    found: dict[str, list[int]] = {together.add(p, params): [] for p in prompts}
    while together.has_work:
        for token in together.step():
            found[token.request_id].append(token.token_id)
    for prompt, tokens in zip(prompts, found.values(), strict=True):
        alone = Engine(make_hybrid_runner("NONE", max_num_tokens=128), vocab_size=VOCAB)
        alone.add(prompt, params)
        expected = []
        while alone.has_work:
            expected += [t.token_id for t in alone.step()]
        assert tokens == expected


def test_decode_is_one_graph_and_mixed_batches_break_at_breakpoints_only() -> None:
    runner = make_hybrid_runner("FULL_AND_PIECEWISE", capture_sizes=[4])
    graphs = {d.mode: c.num_graphs for d, c in runner.manager.captured.items()}
    assert graphs == {CUDAGraphMode.FULL: 1, CUDAGraphMode.PIECEWISE: 6}
    groups = {g.backend: g for g in runner.report.groups}
    assert groups["short_conv"].in_piece
    assert groups["kv_compressor"].in_piece
    assert groups["short_conv"].mixed == groups["short_conv"].decode == "recorded"
    assert not groups["linear_attention"].in_piece
    assert (groups["linear_attention"].mixed, groups["linear_attention"].decode) == ("breaks", "recorded")


def test_asked_for_full_a_hybrid_breaks_at_linear_attention_alone_in_mixed_batches() -> None:
    runner = make_hybrid_runner("FULL", capture_sizes=[4])
    assert runner.report.mode_resolved == "FULL_AND_PIECEWISE"
    mixed = [c for d, c in runner.manager.captured.items() if d.uniform_query_len is None]
    assert [c.num_graphs for c in mixed] == [3]
    assert all(name.startswith("mrv2::linear_attention") for name in mixed[0].eager)


def test_piecewise_capture_never_asks_linear_attention_for_capturable_metadata_and_always_asks_short_conv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, bool, int]] = []
    for cls, name in ((LinearAttentionMetadataBuilder, "linear"), (ShortConvMetadataBuilder, "conv")):
        build = cls.build

        def noting(self: Any, common: Any, *, for_capture: bool, _build: Any = build, _name: str = name) -> Any:
            asked.append((_name, for_capture, common.max_query_len))
            return _build(self, common, for_capture=for_capture)

        monkeypatch.setattr(cls, "build", noting)
    runner = make_hybrid_runner("PIECEWISE", capture_sizes=[8, 32])
    at_capture = [(name, for_capture) for name, for_capture, _ in asked]
    assert sorted(at_capture) == [("conv", True)] * 4 + [("linear", False)] * 4, "2 sizes, warm-up and capture"
    assert max(length for name, _, length in asked if name == "linear") > 1, "prefill, built though not captured"
    asked.clear()
    runner.execute([work("a", [1, 2, 3], 0, [0], state_slot=0)])
    assert sorted((name, for_capture) for name, for_capture, _ in asked) == [("conv", False), ("linear", False)]


GUESSED = [[5], [1, 2, 3, 1, 2, 3], list(range(30)), [9] * 11]


def serve(mode: str, speculator: Any) -> tuple[list[list[int]], Any]:
    runner = make_hybrid_runner(mode, speculator=speculator, capture_sizes=[16])
    engine = Engine(runner, vocab_size=VOCAB)
    found: dict[str, list[int]] = {engine.add(p, SamplingParams(max_tokens=14)): [] for p in GUESSED}
    while engine.has_work:
        for token in engine.step():
            found[token.request_id].append(token.token_id)
    return list(found.values()), runner.report.speculation


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return serve("NONE", None)[0]


@pytest.mark.parametrize(
    ("name", "mode"),
    [*(("lookup", m) for m in ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")), ("itself", "FULL_AND_PIECEWISE")],
)
def test_rejected_guesses_leave_no_trace_in_any_state(name: str, mode: str, plain: list[list[int]]) -> None:
    guessed, report = serve(mode, PromptLookup(3) if name == "lookup" else DraftModel(HybridDecoder(), 3))
    assert guessed == plain
    assert 0 < report.acceptance_rate <= 1
    assert (report.acceptance_rate == 1) == (name == "itself")


@pytest.mark.parametrize("slots", [(-1,), (0, 0), (6,)])
def test_a_request_without_a_state_slot_of_its_own_is_refused(slots: tuple[int, ...]) -> None:
    runner = make_hybrid_runner("NONE")
    with pytest.raises(ValueError, match="state_slot of its own from 0 to 5"):
        runner.execute([work(str(i), [1], 0, [i], state_slot=slot) for i, slot in enumerate(slots)])
