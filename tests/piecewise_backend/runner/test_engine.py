"""Continuous batching, against each prompt decoded alone."""

import pytest

from piecewise_backend.reasons import ReasonCode
from piecewise_backend.runner import LLM, Engine, SamplingParams
from tests.tiny import VOCAB, TinyDecoder, make_runner, oracle_greedy, serve_at_random

PROMPTS = [[5], [1, 2, 3], list(range(40)), [7] * 20, list(range(90, 60, -1)), [3, 1, 4, 1, 5, 9, 2, 6], [11, 12]]


def make_engine(mode: str = "FULL_AND_PIECEWISE", **settings: object) -> tuple[Engine, TinyDecoder]:
    model = TinyDecoder()
    return Engine(make_runner(mode, model=model, **settings), vocab_size=VOCAB), model


def make_llm(model: TinyDecoder, **limits: int) -> LLM:
    options = {"recorder": "emulated", "compiler": "eager", "cache": False}
    limits = {"max_num_tokens": 16, "max_num_reqs": 4, "max_model_len": 64, "block_size": 16} | limits
    return LLM(model, vocab_size=VOCAB, device="cpu", options=options, **limits)


def run(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for token in engine.step():
            tokens.setdefault(token.request_id, []).append(token.token_id)
    return tokens


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_prompts_in_one_batch_get_the_tokens_they_get_alone(mode: str) -> None:
    engine, model = make_engine(mode)
    ids = [engine.add(p, SamplingParams(max_tokens=12)) for p in PROMPTS]
    tokens = run(engine)
    assert [tokens[i] for i in ids] == [oracle_greedy(model, p, 12) for p in PROMPTS]


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_preemption_changes_no_token(mode: str) -> None:
    engine, model = make_engine(mode, num_blocks=4)
    ids = [engine.add(p, SamplingParams(max_tokens=12)) for p in PROMPTS]
    tokens = run(engine)
    assert ReasonCode.PREEMPTED in engine.runner.report.reasons.codes()
    assert [tokens[i] for i in ids] == [oracle_greedy(model, p, 12) for p in PROMPTS]


def test_requests_that_come_and_go_at_random_get_the_tokens_they_get_alone() -> None:
    engine, model = make_engine("FULL_AND_PIECEWISE", num_blocks=8)
    serve_at_random(engine, model)


def test_a_bad_prompt_is_refused_and_the_others_are_served() -> None:
    model = TinyDecoder()
    llm = make_llm(model, num_blocks=4)
    results = llm.generate([[1, 2], [], [VOCAB], [1] * 64, [3]], SamplingParams(max_tokens=4))
    assert [r.finish_reason for r in results] == ["length", "refused", "refused", "refused", "length"]
    assert results[0].token_ids == oracle_greedy(model, [1, 2], 4)
    assert results[4].token_ids == oracle_greedy(model, [3], 4)
    assert "at least one token" in results[1].error
    assert "from 0 to 96" in results[2].error
    assert "too long" in results[3].error
    with pytest.raises(ValueError, match="at least one token"):
        _ = results[1].text
    assert ReasonCode.REQUEST_REFUSED in llm.report.reasons.codes()


def test_more_blocks_than_exist_is_an_error_that_says_how_many() -> None:
    engine, _ = make_engine(num_blocks=2)
    with pytest.raises(ValueError, match="needs up to 4 cache blocks of 16 tokens, and there are 2"):
        engine.add([1] * 40, SamplingParams(max_tokens=10))
    assert not engine.has_work


def test_streams_that_overlap_do_not_take_each_others_tokens() -> None:
    model = TinyDecoder()
    llm = make_llm(model)
    one, other = (llm.stream([p], SamplingParams(max_tokens=6)) for p in ([1, 2], [9]))
    mixed = [(next(one).token_id, next(other).token_id) for _ in range(6)]
    assert [a for a, _ in mixed] == oracle_greedy(model, [1, 2], 6)
    assert [b for _, b in mixed] == oracle_greedy(model, [9], 6)


def test_leaving_a_stream_early_frees_its_blocks() -> None:
    llm = make_llm(TinyDecoder())
    stream = llm.stream([[1, 2, 3]], SamplingParams(max_tokens=20))
    next(stream)
    stream.close()
    pool = llm.engine.scheduler.pool
    assert pool.num_free == pool.num_blocks
    assert not llm.engine.has_work


def test_a_request_stops_at_its_stop_token_and_at_the_models_length() -> None:
    engine, model = make_engine(max_model_len=48)
    expected = oracle_greedy(model, [1, 2, 3], 8)
    name = engine.add([1, 2, 3], SamplingParams(max_tokens=8, stop_token_ids=(expected[3],)))
    assert run(engine)[name] == expected[: expected.index(expected[3]) + 1]
    name = engine.add([1] * 44, SamplingParams(max_tokens=20))
    assert len(run(engine)[name]) == 4


def test_the_host_reads_the_tokens_of_a_step_while_the_next_one_runs() -> None:
    engine, model = make_engine()
    engine.add([1, 2, 3], SamplingParams(max_tokens=3), "a")
    given = [[t.token_id for t in engine.step()] for _ in range(4)]
    assert given == [[], *([t] for t in oracle_greedy(model, [1, 2, 3], 3))]
    assert not engine.has_work


def test_no_step_is_run_for_a_request_that_has_all_its_tokens_already() -> None:
    engine, _ = make_engine("NONE")
    engine.add([1, 2, 3], SamplingParams(max_tokens=3))
    run(engine)
    assert engine.runner.report.uncaptured_runs == 3


def test_a_request_that_stops_has_one_step_too_many_whose_token_is_dropped() -> None:
    engine, model = make_engine("NONE")
    expected = oracle_greedy(model, [1, 2, 3], 8)
    stop = expected[2]
    engine.add([1, 2, 3], SamplingParams(max_tokens=8, stop_token_ids=(stop,)), "a")
    assert run(engine)["a"] == expected[: expected.index(stop) + 1]
    assert engine.runner.report.uncaptured_runs == expected.index(stop) + 2
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_a_request_may_be_aborted_while_its_token_is_on_the_way_and_its_name_used_again() -> None:
    engine, model = make_engine()
    engine.add([1, 2, 3], SamplingParams(max_tokens=5), "a")
    engine.step()
    engine.abort("a")
    assert not engine.has_work
    engine.add([4, 5], SamplingParams(max_tokens=5), "a")
    assert run(engine)["a"] == oracle_greedy(model, [4, 5], 5)


def test_a_request_may_be_preempted_while_its_token_is_on_the_way() -> None:
    engine, model = make_engine()
    for name, prompt in (("a", [1, 2, 3]), ("b", [4, 5])):
        engine.add(prompt, SamplingParams(max_tokens=6), name)
    tokens: dict[str, list[int]] = {}
    for step in range(40):
        if step in (1, 2, 4, 7) and engine.scheduler.running:
            engine.scheduler.preempt_last()
        for token in engine.step():
            tokens.setdefault(token.request_id, []).append(token.token_id)
    assert tokens == {"a": oracle_greedy(model, [1, 2, 3], 6), "b": oracle_greedy(model, [4, 5], 6)}
