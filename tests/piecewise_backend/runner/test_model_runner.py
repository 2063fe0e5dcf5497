"""Steps of a tiny decoder in every mode, against a dense computation without cache."""

import pytest
import torch

from piecewise_backend.cudagraph.modes import CUDAGraphMode
from piecewise_backend.reasons import ReasonCode
from tests.tiny import TinyDecoder, make_runner, oracle_logits, work

MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


@pytest.mark.parametrize("mode", MODES)
def test_prefill_chunks_and_decode_mixed_in_one_step_give_the_dense_logits(mode: str) -> None:
    model = TinyDecoder()
    runner = make_runner(mode, model=model, capture_sizes=[1, 2, 4, 8, 16, 32])
    first, second, third = [1, 2, 3, 4, 5, 6, 7], [50, 51], list(range(20))
    runner.execute([work("a", first[:5], 0, [3, 1])])
    logits = runner.execute([work("a", first[5:], 5, [3, 1]), work("b", second, 0, [7]), work("c", third, 0, [0, 9])])
    expected = torch.stack([oracle_logits(model, t)[-1] for t in (first, second, third)])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    logits = runner.execute(
        [
            work("c", [8], 20, [0, 9], is_decode=True),
            work("a", [9], 7, [3, 1], is_decode=True),
            work("b", [10], 2, [7], is_decode=True),
        ]
    )
    expected = torch.stack([oracle_logits(model, t)[-1] for t in ([*third, 8], [*first, 9], [*second, 10])])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def test_one_trace_serves_every_size_from_one_token_up() -> None:
    model = TinyDecoder()
    torch._dynamo.utils.counters.clear()
    runner = make_runner("NONE", model=model)
    for count in range(1, 33):
        tokens = list(range(count))
        logits = runner.execute([work("a", tokens, 0, [0, 1])])
        torch.testing.assert_close(logits[0], oracle_logits(model, tokens)[-1], atol=1e-5, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("largest", [1, 2, 3])
def test_the_smallest_limits_work(largest: int) -> None:
    model = TinyDecoder()
    runner = make_runner("FULL_AND_PIECEWISE", model=model, max_num_tokens=largest, max_num_reqs=1)
    logits = runner.execute([work("a", [5], 0, [0])])
    torch.testing.assert_close(logits[0], oracle_logits(model, [5])[-1], atol=1e-5, rtol=1e-4)


def test_identical_layers_are_compiled_once() -> None:
    report = make_runner("NONE", model=TinyDecoder(num_layers=6)).report
    assert (report.num_pieces, report.num_breakpoints, len(report.compiled)) == (7, 6, 3)


def test_full_replays_one_graph_and_piecewise_one_per_piece() -> None:
    runner = make_runner("FULL_AND_PIECEWISE", capture_sizes=[2])
    graphs = {d.mode: c.num_graphs for d, c in runner.manager.captured.items()}
    assert graphs == {CUDAGraphMode.FULL: 1, CUDAGraphMode.PIECEWISE: 4}


def test_padded_rows_write_nothing_to_the_cache() -> None:
    """R36: 6 tokens padded to 8."""
    runner = make_runner("PIECEWISE", capture_sizes=[8])
    runner.execute([work("a", [1, 2, 3, 4, 5, 6], 0, [2])])
    for layer in runner.layers.values():
        written = layer.kv_cache.abs().sum(dim=(1, 3, 4)) != 0
        assert written.nonzero().tolist() == [[2, i] for i in range(6)]


def test_capturing_leaves_the_cache_as_it_was() -> None:
    for layer in make_runner("FULL_AND_PIECEWISE").layers.values():
        assert not layer.kv_cache.any()


def test_a_batch_above_every_size_runs_without_graphs_for_a_reason() -> None:
    runner = make_runner("PIECEWISE", capture_sizes=[4])
    runner.execute([work("a", list(range(10)), 0, [0])])
    assert runner.report.num_replays == 0
    assert ReasonCode.ABOVE_ALL_SIZES in runner.report.reasons.codes()


def test_without_a_recorder_the_mode_is_none_and_the_reason_says_so() -> None:
    report = make_runner("FULL", recorder="auto").report
    assert report.mode_resolved == "NONE"
    assert ReasonCode.NO_RECORDER in report.reasons.codes()


class BreaksTheGraph(TinyDecoder):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if input_ids.sum().item() > 3:  # the line to be named
            return super().forward(input_ids, positions)
        return super().forward(input_ids + 1, positions)


def test_a_graph_break_names_the_line_and_the_way_out() -> None:
    with pytest.raises(RuntimeError, match=r"test_model_runner.py:\d+: if input_ids.sum\(\).item\(\) > 3"):
        make_runner(model=BreaksTheGraph())


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "at least one request"),
        ([work("a", [], 3, [0])], "needs a new token"),
        ([work("a", list(range(33)), 0, [0, 1, 2])], "33 tokens is beyond this runner's 32"),
        ([work(str(i), [1], 0, [i]) for i in range(7)], "7 requests is beyond this runner's 6"),
        ([work("a", [1], 128, list(range(8)))], "129 tokens in one sequence is beyond this runner's 128"),
        ([work("a", [1], 0, list(range(9)))], "9 blocks of one request is beyond this runner's 8"),
        ([work("a", [1], -1, [0])], "'a' has num_computed_tokens -1"),
        ([work("a", [1], 0, [3]), work("b", [1], 16, [0])], "'b' has 17 tokens after this step, but block_ids of 1"),
        (
            [work("a", [1], 0, [3]), work("b", [1], 0, [48])],
            "'b' names block 48; .* blocks 0 to 47",
        ),
        ([work("a", [1], 0, [-1])], "names block -1"),
        ([work("a", [1, -2], 0, [0])], "token_ids of request 'a' must be integers of 0 or more, got .-2"),
        ([work("a", [1, -1], 0, [0])], "token_ids of request 'a' must be integers of 0 or more, got .-1"),
        ([work("a", [1, 3.9], 0, [0])], "token_ids of request 'a' must be integers of 0 or more, got .1.0, 3.9"),
        ([work("a", [1, 2], 0, [0], num_draft_tokens=2)], "num_draft_tokens 2, allowed are 0 to 1"),
        ([work("a", [1, 2], 0, [0], num_draft_tokens=-1)], "num_draft_tokens -1, allowed are 0 to 1"),
    ],
)
def test_a_step_beyond_the_limits_is_refused_and_the_runner_goes_on(requests: list, message: str) -> None:
    model = TinyDecoder()
    runner = make_runner(model=model)
    with pytest.raises(ValueError, match=message):
        runner.execute(requests)
    logits = runner.execute([work("a", [1, 2], 0, [0])])
    torch.testing.assert_close(logits[0], oracle_logits(model, [1, 2])[-1], atol=1e-5, rtol=1e-4)


def test_memory_running_out_while_capturing_drops_that_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from piecewise_backend.cudagraph.emulated import EmulatedRecorder

    begin, calls = EmulatedRecorder.begin, []

    def fails_once(self: EmulatedRecorder) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory left")
        begin(self)

    monkeypatch.setattr(EmulatedRecorder, "begin", fails_once)
    runner = make_runner("PIECEWISE", capture_sizes=[2, 4])
    assert [d.num_tokens for d in runner.manager.captured] == [2]
    assert ReasonCode.OUT_OF_MEMORY in runner.report.reasons.codes()
    runner.execute([work("a", [1, 2, 3], 0, [0])])


def test_any_number_of_runners_is_started_in_one_process() -> None:
    """Dynamo compiles one function a few times only, then gives up."""
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        runner = make_runner("NONE", model=TinyDecoder(num_layers=1))
    runner.execute([work("a", [1, 2], 0, [0])])


def test_attention_between_graphs_is_called_without_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention.backends.pytorch import TorchAttentionImpl

    bound: list[torch.Size] = []
    bind = TorchAttentionImpl.bind

    def noting(self: TorchAttentionImpl, query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> object:
        bound.append(query.shape)
        return bind(self, query, kv_cache, out)

    monkeypatch.setattr(TorchAttentionImpl, "bind", noting)
    model = TinyDecoder()
    runner = make_runner("PIECEWISE", model=model, capture_sizes=[4])
    assert bound == [(4, 4, 16)] * 3
    logits = runner.execute([work("a", [1, 2, 3], 0, [0])])
    torch.testing.assert_close(logits[0], oracle_logits(model, [1, 2, 3])[-1], atol=1e-5, rtol=1e-4)


def test_fast_pieces_gives_the_same_results() -> None:
    model = TinyDecoder()
    runner = make_runner("FULL_AND_PIECEWISE", model=model, fast_pieces=True, max_num_tokens=48, compiler="inductor")
    for tokens in ([1, 2, 3], list(range(40))):
        logits = runner.execute([work("a", tokens, 0, [0, 1, 2])])
        torch.testing.assert_close(logits[0], oracle_logits(model, tokens)[-1], atol=1e-4, rtol=1e-3)
    logits = runner.execute([work("a", [7], 40, [0, 1, 2], is_decode=True)])
    expected = oracle_logits(model, [*range(40), 7])[-1]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-3)


def test_a_start_runs_each_distinct_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from attention.backends.pytorch import TorchAttentionImpl

    forwards: list[int] = []
    forward = TorchAttentionImpl.forward

    def noting(self: TorchAttentionImpl, *args: object) -> None:
        forwards.append(len(args[0]))
        forward(self, *args)

    monkeypatch.setattr(TorchAttentionImpl, "forward", noting)
    make_runner("PIECEWISE", model=TinyDecoder(), capture_sizes=[4])
    assert forwards.count(4) == 1, "one of three alike layers to warm up, and none where nothing is to be computed"


def test_a_little_less_free_memory_gives_the_same_number_of_blocks() -> None:
    from piecewise_backend.runner.cache_size import _rounded_down

    assert [_rounded_down(n) for n in (0, 1, 31, 33, 1000, 1023, 100_000)] == [0, 1, 31, 32, 992, 992, 98304]
    assert _rounded_down(65_600) == _rounded_down(66_500)


def test_decode_graphs_of_many_rows_leave_the_logits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose memory they would hold; the head then runs after the replay."""
    from piecewise_backend.runner import model_runner

    monkeypatch.setattr(model_runner, "_MOST_LOGITS_ROWS", 2)
    model = TinyDecoder()
    runner = make_runner("FULL_DECODE_ONLY", model=model, capture_sizes=[2, 4])
    outputs = {d.num_tokens: len(c.outputs) for d, c in runner.manager.captured.items()}
    assert outputs == {2: 2, 4: 1}
    for count in (2, 3):
        prompts = [[3 + i, 5, 7 + i] for i in range(count)]
        runner.execute([work(f"{count} {i}", p[:2], 0, [i]) for i, p in enumerate(prompts)])
        before = runner.report.num_replays
        steps = [work(f"{count} {i}", p[2:], 2, [i], is_decode=True) for i, p in enumerate(prompts)]
        logits = runner.execute(steps)
        assert runner.report.num_replays == before + 1
        for row, prompt in zip(logits, prompts, strict=True):
            torch.testing.assert_close(row, oracle_logits(model, prompt)[-1], atol=1e-5, rtol=1e-4)
