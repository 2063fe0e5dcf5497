"""Which tokens run next."""

import random

import pytest

from piecewise_backend.runner.block_pool import BlockPool
from piecewise_backend.runner.request import Request, SamplingParams
from piecewise_backend.runner.scheduler import Scheduler, advance


def make(num_blocks: int = 16, tokens: int = 8, reqs: int = 4, **settings: object) -> Scheduler:
    limits = {"max_num_tokens": tokens, "max_num_reqs": reqs, "max_model_len": 64}
    return Scheduler(BlockPool(num_blocks, 4), **limits | settings)


def request(name: str, prompt: int, max_tokens: int = 4) -> Request:
    return Request(name, tuple(range(prompt)), SamplingParams(max_tokens=max_tokens))


def run_step(scheduler: Scheduler) -> dict[str, int]:
    """One step with a pretended token for every request that is due one; returns tokens per request."""
    scheduled = scheduler.schedule()
    for _, r in advance(scheduled):
        r.output_ids.append(0)
        if len(r.output_ids) == r.params.max_tokens:
            scheduler.finish(r)
    return {r.request_id: len(w.token_ids) for r, w in scheduled}


def test_a_long_prompt_runs_in_chunks_of_the_token_budget() -> None:
    scheduler = make(tokens=8)
    scheduler.add(request("a", 19))
    assert [run_step(scheduler) for _ in range(4)] == [{"a": 8}, {"a": 8}, {"a": 3}, {"a": 1}]


def test_decoding_requests_go_first_and_prefill_fills_the_rest_of_the_budget() -> None:
    scheduler = make(tokens=8)
    scheduler.add(request("a", 3))
    run_step(scheduler)
    scheduler.add(request("b", 20))
    assert run_step(scheduler) == {"a": 1, "b": 7}


def test_no_more_requests_run_than_allowed() -> None:
    scheduler = make(tokens=8, reqs=2)
    for name in "abc":
        scheduler.add(request(name, 2))
    assert set(run_step(scheduler)) == {"a", "b"}


def test_a_request_counts_as_decode_only_once_its_prompt_is_in_the_cache() -> None:
    """R25: a prefill with few tokens left is a prefill."""
    scheduler = make(tokens=8)
    scheduler.add(request("a", 9))
    states = []
    for _ in range(3):
        scheduled = scheduler.schedule()
        states.append((len(scheduled[0][1].token_ids), scheduled[0][1].is_decode))
        for _, r in advance(scheduled):
            r.output_ids.append(0)
    assert states == [(8, False), (1, False), (1, True)]


def test_the_request_that_came_last_gives_way_when_blocks_run_out() -> None:
    preempted = []
    scheduler = make(num_blocks=4, tokens=16, on_preempt=preempted.append)
    first, last = request("a", 8, max_tokens=8), request("b", 7, max_tokens=8)
    scheduler.add(first)
    scheduler.add(last)
    run_step(scheduler)
    run_step(scheduler)
    assert preempted == [last]
    assert last.num_computed_tokens == 0
    assert first in scheduler.running


def test_a_preempted_request_is_computed_again_with_its_output() -> None:
    scheduler = make(num_blocks=4, tokens=16)
    scheduler.add(request("a", 8, max_tokens=8))
    scheduler.add(request("b", 7, max_tokens=8))
    seen = [run_step(scheduler) for _ in range(30)]
    assert {"b": 8} in seen, "prompt of 7 and the one token it had"
    assert not scheduler.has_work


def test_a_request_that_could_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="needs up to 6 cache blocks of 4 tokens, and there are 4"):
        make(num_blocks=4).add(request("a", 20))


def test_blocks_are_never_lost_or_shared_whatever_comes_and_goes() -> None:
    rng = random.Random(0)
    for _ in range(50):
        scheduler = make(num_blocks=rng.randint(6, 20), tokens=rng.randint(4, 12), reqs=rng.randint(1, 4))
        pending = [request(str(i), rng.randint(1, 16), rng.randint(1, 6)) for i in range(8)]
        for _ in range(400):
            if pending and rng.random() < 0.3:
                scheduler.add(pending.pop())
            step = run_step(scheduler)
            assert sum(step.values()) <= scheduler.max_num_tokens
            held = [b for r in (*scheduler.running, *scheduler.waiting) for b in r.block_ids]
            assert len(held) == len(set(held))
            assert len(held) + scheduler.pool.num_free == scheduler.pool.num_blocks
            if not pending and not scheduler.has_work:
                break
        assert not scheduler.has_work, "every request finishes"
        assert scheduler.pool.num_free == scheduler.pool.num_blocks
