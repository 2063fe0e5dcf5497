"""Logits to tokens."""

import pytest
import torch

from piecewise_backend.runner.request import Request, SamplingParams
from piecewise_backend.runner.sampling import Sampler, keep_top_k_top_p

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 5.0, 0.0]])


def request(name: str = "a", **params: object) -> Request:
    return Request(name, (1,), SamplingParams(**params))


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert Sampler(torch.device("cpu")).sample(LOGITS, [request(), request()]) == [0, 2]


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
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / many
    torch.testing.assert_close(shares, LOGITS[0].softmax(-1), atol=0.03, rtol=0)


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    wide = torch.randn(1, 500)
    alone = Sampler(torch.device("cpu"))
    a = [alone.sample(wide, [request(temperature=2.0, seed=7)])[0] for _ in range(5)]
    crowded = Sampler(torch.device("cpu"))
    others = [request(str(i), temperature=1.0) for i in range(3)]
    b = [crowded.sample(wide.expand(4, -1), [*others, request(temperature=2.0, seed=7)])[3] for _ in range(5)]
    assert a == b
    assert len(set(a)) > 1


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"max_tokens": 0}])
def test_impossible_parameters_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
