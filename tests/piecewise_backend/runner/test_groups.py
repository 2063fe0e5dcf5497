"""Which groups are recorded, what their builders are asked, and what happens when a builder does not keep its word."""

import pytest
import torch

from attention.backends.pytorch import TorchBackend, TorchMetadataBuilder
from attention.base import AttentionCGSupport
from piecewise_backend.cudagraph.fingerprint import StaleMetadata
from piecewise_backend.reasons import FallbackError, ReasonCode
from piecewise_backend.runner import Engine, ModelRunner, PromptLookup, SamplingParams
from tests.piecewise_backend.runner.doubles import (
    AllocatesAtRunTime,
    Build,
    ChangesKernel,
    ClaimsEverything,
    InitialisesLazily,
    SingleTokenOnly,
    install,
    recording,
    supporting,
    tiny,
)
from tests.tiny import VOCAB, make_runner, oracle_greedy, oracle_logits, work

PROMPTS = [[5], [1, 2, 3, 1, 2, 3, 1, 2], list(range(30)), [7] * 9]


def serve(runner: ModelRunner, max_tokens: int = 8) -> list[list[int]]:
    engine = Engine(runner, vocab_size=VOCAB)
    tokens: dict[str, list[int]] = {engine.add(p, SamplingParams(max_tokens=max_tokens)): [] for p in PROMPTS}
    while engine.has_work:
        for token in engine.step():
            tokens[token.request_id].append(token.token_id)
    return list(tokens.values())


def expected(runner: ModelRunner, max_tokens: int = 8) -> list[list[int]]:
    return [oracle_greedy(runner.model, p, max_tokens) for p in PROMPTS]


def graphs_per_step(runner: ModelRunner) -> dict[str, int]:
    """Graphs of the largest variant of each kind."""
    found = {}
    for size in runner.report.sizes:
        found.setdefault(size.descriptor.split(",")[0], size.num_graphs)
    return found


# Group by group.


def test_one_weak_backend_among_many_layers_breaks_at_its_own_operators_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """28 layers that can always be recorded, 4 that record one token a request, and decode of 1 + 3 tokens."""
    install(monkeypatch, SingleTokenOnly)
    model = tiny(32, windows=(3, 11, 19, 27))
    runner = make_runner(model=model, speculator=PromptLookup(3), capture_sizes=[8])
    assert runner.report.mode_resolved == "PIECEWISE", "the label is the minimum"
    assert graphs_per_step(runner) == {"PIECEWISE mixed": 33, "PIECEWISE decode x4": 5}
    groups = {g.backend: g for g in runner.report.groups}
    assert (groups["torch"].num_layers, groups["torch"].decode, groups["torch"].mixed) == (28, "recorded", "breaks")
    assert (groups["windowed"].num_layers, groups["windowed"].decode) == (4, "breaks")
    (reason,) = (r for r, _ in runner.report.reasons if r.code is ReasonCode.GROUP_BREAKS)
    assert reason.subject == "windowed (4 layers) in decode batches"
    assert "UNIFORM_SINGLE_TOKEN_DECODE" in reason.detail
    assert serve(runner) == expected(runner)
    replayed = {s.descriptor.split(",")[0] for s in runner.report.sizes if s.replays}
    assert "PIECEWISE decode x4" in replayed


def test_the_strict_minimum_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, SingleTokenOnly)
    runner = make_runner(model=tiny(4), speculator=PromptLookup(3), capture_sizes=[8], strict_minimum=True)
    assert graphs_per_step(runner) == {"PIECEWISE mixed": 5}
    assert {g.decode for g in runner.report.groups} == {"breaks"}
    assert serve(runner) == expected(runner)


@pytest.mark.parametrize(
    ("level", "mode", "k", "resolved", "graphs"),
    [
        ("UNIFORM_BATCH", "FULL", 0, "FULL_AND_PIECEWISE", {"PIECEWISE mixed": 2, "FULL decode x1": 1}),
        ("UNIFORM_SINGLE_TOKEN_DECODE", "FULL", 0, "FULL_AND_PIECEWISE", {"PIECEWISE mixed": 2, "FULL decode x1": 1}),
        ("UNIFORM_BATCH", "FULL_AND_PIECEWISE", 3, "FULL_AND_PIECEWISE", {"PIECEWISE mixed": 5, "FULL decode x4": 1}),
        ("NEVER", "FULL_AND_PIECEWISE", 0, "PIECEWISE", {"PIECEWISE mixed": 5, "PIECEWISE decode x1": 2}),
        ("NEVER", "FULL_DECODE_ONLY", 0, "PIECEWISE", {"PIECEWISE mixed": 5, "PIECEWISE decode x1": 2}),
        ("NEVER", "PIECEWISE", 0, "PIECEWISE", {"PIECEWISE mixed": 5}),
        ("ALWAYS", "FULL", 3, "FULL", {"FULL mixed": 1, "FULL decode x4": 1}),
    ],
)
def test_what_is_recorded_follows_from_what_each_group_supports(
    monkeypatch: pytest.MonkeyPatch, level: str, mode: str, k: int, resolved: str, graphs: dict[str, int]
) -> None:
    """One weak layer of four. Asked for FULL, mixed batches break at it alone."""
    install(monkeypatch, supporting(AttentionCGSupport[level]))
    runner = make_runner(mode, model=tiny(4), speculator=PromptLookup(k) if k else None, capture_sizes=[4, 8])
    assert runner.report.mode_resolved == resolved
    assert graphs_per_step(runner) == graphs
    assert serve(runner) == expected(runner)


def test_decode_only_kernels_with_speculation_resolve_to_piecewise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Like FlashInfer's decode wrapper: one token a request."""
    monkeypatch.setattr(TorchBackend, "get_builder_cls", staticmethod(lambda: SingleTokenOnly))
    runner = make_runner("FULL_AND_PIECEWISE", model=tiny(), speculator=PromptLookup(3), capture_sizes=[8])
    assert runner.report.mode_resolved == "PIECEWISE"
    (reason,) = (r for r, _ in runner.report.reasons if r.code is ReasonCode.MODE_ADAPTED)
    assert "too little for decode of 4 tokens: PIECEWISE" in reason.detail
    assert serve(runner) == expected(runner)


def test_a_backend_that_bakes_host_offsets_is_recorded_for_decode_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """R31."""
    monkeypatch.setattr(TorchBackend, "get_builder_cls", staticmethod(lambda: SingleTokenOnly))
    runner = make_runner("FULL", model=tiny(), capture_sizes=[8])
    assert runner.report.mode_resolved == "FULL_AND_PIECEWISE"
    assert ReasonCode.MODE_ADAPTED in runner.report.reasons.codes()


def test_a_group_that_breaks_is_an_error_where_fallbacks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, supporting(AttentionCGSupport.NEVER))
    with pytest.raises(FallbackError, match="mode_adapted"):
        make_runner("FULL_AND_PIECEWISE", model=tiny(), on_fallback="error")


# The exact sequence of builds.


@pytest.mark.parametrize(
    ("mode", "at_capture"),
    [
        ("NONE", []),
        ("PIECEWISE", ["torch 8", "windowed 8"] * 2),
        (
            "FULL",
            [f"{name} {n} for capture" for n in (8, 8, 6, 6) for name in ("torch", "windowed")],
        ),
        ("FULL_DECODE_ONLY", ["torch 6 for capture", "windowed 6 for capture"] * 2),
        (
            "FULL_AND_PIECEWISE",
            [*["torch 8", "windowed 8"] * 2, *["torch 6 for capture", "windowed 6 for capture"] * 2],
        ),
    ],
)
def test_builders_are_asked_once_to_warm_up_once_to_capture_and_once_a_step(
    monkeypatch: pytest.MonkeyPatch, mode: str, at_capture: list[str]
) -> None:
    """The largest decode batch is one of 6 requests."""
    builds: list[Build] = []
    install(monkeypatch, recording(builds, TorchMetadataBuilder, "windowed"))
    builder = recording(builds, TorchMetadataBuilder, "torch")
    monkeypatch.setattr(TorchBackend, "get_builder_cls", staticmethod(lambda: builder))
    runner = make_runner(mode, model=tiny(), capture_sizes=[8])
    assert [str(b) for b in builds] == at_capture
    builds.clear()
    runner.execute([work("a", [1, 2, 3], 0, [0])])
    runner.execute([work("a", [4], 3, [0], is_decode=True)])
    padded = {"NONE": (3, 1), "FULL_DECODE_ONLY": (3, 6), "PIECEWISE": (8, 8)}.get(mode, (8, 6))
    assert [str(b) for b in builds] == [f"{name} {n}" for n in padded for name in ("torch", "windowed")]


def test_a_weak_group_is_never_asked_for_capturable_metadata_while_the_strong_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    builds: list[Build] = []
    install(monkeypatch, recording(builds, SingleTokenOnly, "windowed"))
    builder = recording(builds, TorchMetadataBuilder, "torch")
    monkeypatch.setattr(TorchBackend, "get_builder_cls", staticmethod(lambda: builder))
    make_runner("FULL", model=tiny(), capture_sizes=[8])
    mixed = [str(b) for b in builds if b.common.num_tokens == 8]
    assert mixed == ["torch 8 for capture", "windowed 8"] * 2
    assert [str(b) for b in builds if b.common.num_tokens == 6] == ["torch 6 for capture", "windowed 6 for capture"] * 2


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_dummy_sequences_are_as_long_as_the_model_allows_and_never_longer(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    builds: list[Build] = []
    lengths: list[int] = []

    class Noting(TorchMetadataBuilder):
        def build(self, common, *, for_capture):
            lengths.extend(common.seq_lens_cpu.tolist())
            return super().build(common, for_capture=for_capture)

    install(monkeypatch, recording(builds, Noting, "windowed"))
    make_runner(mode, model=tiny(), max_model_len=100)
    assert set(lengths) == {100}
    assert all(b.common.max_seq_len == 100 for b in builds)
    assert all(b.common.slot_mapping.data_ptr() == builds[0].common.slot_mapping.data_ptr() for b in builds)


# Builders that do not keep their word.


def test_a_builder_that_lies_about_its_support_is_believed_when_it_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, ClaimsEverything)
    runner = make_runner("FULL", model=tiny(4), capture_sizes=[8])
    assert runner.report.mode_resolved == "FULL_AND_PIECEWISE"
    (reason,) = (r for r, _ in runner.report.reasons if r.code is ReasonCode.SUPPORT_LOWERED)
    assert reason.subject == "windowed (1 layer)"
    assert "declares ALWAYS, taken as UNIFORM_BATCH: it records one token a request" in reason.detail
    assert "ClaimsEverything.cudagraph_support" in reason.hint
    assert "windowed (1 layer)" in caplog.text
    assert graphs_per_step(runner) == {"PIECEWISE mixed": 2, "FULL decode x1": 1}
    assert serve(runner) == expected(runner)


def test_a_lie_is_found_step_by_step_down_to_what_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ClaimsEverything)
    runner = make_runner("FULL", model=tiny(4), speculator=PromptLookup(3), capture_sizes=[8])
    lowered = [r.detail for r, _ in runner.report.reasons if r.code is ReasonCode.SUPPORT_LOWERED]
    assert [d.split(":")[0] for d in lowered] == [
        "declares ALWAYS, taken as UNIFORM_BATCH",
        "declares UNIFORM_BATCH, taken as UNIFORM_SINGLE_TOKEN_DECODE",
    ]
    assert graphs_per_step(runner) == {"PIECEWISE mixed": 2}, "decode breaks at the same operator, so it needs no own"
    assert serve(runner) == expected(runner)


def test_a_builder_that_allocates_at_run_time_is_caught_by_layer_and_field(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, AllocatesAtRunTime)
    runner = make_runner("FULL", model=tiny(), capture_sizes=[8])
    with pytest.raises(
        StaleMetadata, match=r"field 'seq_lens' of layer 'layers.1.attention' \(.*'windowed'\)"
    ) as error:
        runner.execute([work("a", [1, 2, 3], 0, [0])])
    assert "persistent buffers" in str(error.value)


def test_between_graphs_a_builder_may_allocate_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, AllocatesAtRunTime)
    runner = make_runner("PIECEWISE", model=tiny(), capture_sizes=[8])
    assert serve(runner) == expected(runner)


def test_a_builder_that_changes_its_kernel_between_capture_and_replay_is_caught_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, ChangesKernel)
    runner = make_runner("FULL", model=tiny(), capture_sizes=[8])
    runner.execute([work("a", [1], 30, [0, 1, 2], is_decode=True)])
    with pytest.raises(StaleMetadata, match=r"'kernel' of layer 'layers.1.attention'.*'long' was recorded.*'short'"):
        runner.execute([work("b", [1], 3, [3], is_decode=True)])


def test_a_field_that_no_recorded_kernel_reads_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    class SaysSo(ChangesKernel):
        unrecorded_fields = frozenset({"kernel"})

    install(monkeypatch, SaysSo)
    runner = make_runner("FULL", model=tiny(), capture_sizes=[8])
    assert serve(runner) == expected(runner)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_a_builder_that_initialises_on_its_first_build_is_replayed_right(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """R39: what warmed up is not what is captured."""
    install(monkeypatch, InitialisesLazily)
    runner = make_runner(mode, model=tiny(), capture_sizes=[8])
    tokens = [1, 2, 3, 4]
    logits = runner.execute([work("a", tokens, 0, [0])])
    torch.testing.assert_close(logits[0], oracle_logits(runner.model, tokens)[-1], atol=1e-5, rtol=1e-4)
