"""Logits to tokens."""

import pytest
import torch

from piecewise_backend.runner.request import Request, SamplingParams
from piecewise_backend.runner.sampling import Sampler, keep_top_k_top_p

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 5.0, 0.0]])


def request(name: str = "a", **params: object) -> Request:
    return Request(name, (1,), SamplingParams(**params))


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert Sampler(torch.device("cpu")).sample(LOGITS, [request(), request()]) == [[0], [2]]


def test_top_k_keeps_k_tokens_of_each_row() -> None:
    kept = keep_top_k_top_p(LOGITS, [2, 0], [1.0, 1.0])
    assert kept.isfinite().sum(dim=-1).tolist() == [2, 4]


@pytest.mark.parametrize(("top_p", "count"), [(0.01, 1), (0.64, 1), (0.65, 2), (0.9, 3), (1.0, 4)])
def test_top_p_keeps_the_fewest_tokens_that_reach_p(top_p: float, count: int) -> None:
    # softmax of [2, 1, 0, -1] is [0.644, 0.237, 0.087, 0.032]
    assert keep_top_k_top_p(LOGITS[:1], [0], [top_p]).isfinite().sum() == count


def test_draws_follow_the_distribution() -> None:
    torch.manual_seed(0)
    sampler, many = Sampler(torch.device("cpu")), 4000
    tokens = sampler.sample(LOGITS[:1].expand(many, 4), [request(temperature=1.0)] * many)
    shares = torch.bincount(torch.tensor(tokens)[:, 0], minlength=4) / many
    torch.testing.assert_close(shares, LOGITS[0].softmax(-1), atol=0.03, rtol=0)


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    wide = torch.randn(1, 500)
    alone = Sampler(torch.device("cpu"))
    a = [alone.sample(wide, [request(temperature=2.0, seed=7)])[0][0] for _ in range(5)]
    crowded = Sampler(torch.device("cpu"))
    others = [request(str(i), temperature=1.0) for i in range(3)]
    b = [crowded.sample(wide.expand(4, -1), [*others, request(temperature=2.0, seed=7)])[3][0] for _ in range(5)]
    assert a == b
    assert len(set(a)) > 1


def test_greedy_guesses_are_accepted_up_to_the_first_wrong_one() -> None:
    logits = torch.eye(8)[[3, 5, 1, 4]]  # the model says 3, 5, 1, 4
    sampler = Sampler(torch.device("cpu"))
    for guesses, expected in [([3, 5, 1], [3, 5, 1, 4]), ([3, 0, 1], [3, 5]), ([0, 5, 1], [3])]:
        assert sampler.sample(logits, [request()], [guesses]) == [expected]
    mixed = sampler.sample(torch.cat([logits, logits[:1], logits]), [request()] * 3, [[3, 5, 1], [], [3, 7, 7]])
    assert mixed == [[3, 5, 1, 4], [3], [3, 5]]


@pytest.mark.parametrize("guess", [0, 3])
def test_rejection_sampling_leaves_the_distribution_as_it_is(guess: int) -> None:
    """Likely or not, whatever was guessed: the first token follows p, and so does the second after an accepted one."""
    torch.manual_seed(0)
    sampler, many = Sampler(torch.device("cpu")), 6000
    logits = LOGITS[[0, 1]].repeat(many, 1)
    tokens = sampler.sample(logits, [request(temperature=1.0)] * many, [[guess]] * many)
    first = torch.bincount(torch.tensor([t[0] for t in tokens]), minlength=4) / many
    torch.testing.assert_close(first, LOGITS[0].softmax(-1), atol=0.025, rtol=0)
    assert all((len(t) == 2) == (t[0] == guess) for t in tokens)
    seconds = torch.tensor([t[1] for t in tokens if len(t) == 2])
    expected = LOGITS[1].softmax(-1)
    torch.testing.assert_close(torch.bincount(seconds, minlength=4) / len(seconds), expected, atol=0.1, rtol=0)


def test_a_guess_outside_of_the_top_k_is_never_accepted() -> None:
    tokens = Sampler(torch.device("cpu")).sample(
        LOGITS[[0, 0]].repeat(200, 1), [request(temperature=1.0, top_k=2)] * 200, [[3]] * 200
    )
    assert all(len(t) == 1 and t[0] in (0, 1) for t in tokens)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"max_tokens": 0}])
def test_impossible_parameters_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
