"""Models that write into memory they still read: tokens as of the plain model, merged products or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attention.layers import Attention
from piecewise_backend.reasons import FallbackError, ReasonCode
from tests.tiny import make_runner, work

HEADS, SIZE, VOCAB = 2, 16, 50
HIDDEN = HEADS * SIZE


class Decoder(nn.Module):
    """`run` says what is done with a layer's parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.table = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(256, HIDDEN)
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.attention = Attention(HEADS, SIZE)
        self.down = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.down(self.run(ids, positions))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(self.q(x), self.k(x), self.v(x))


class AttentionsResult(Decoder):
    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.attend(self.embed(ids)).mul_(2)
        x[:, :4] = 1
        return x


class Positions(Decoder):
    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.table(positions)
        positions += 1
        return self.attend(x + self.table(positions))


class TokenIds(Decoder):
    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.attend(self.embed(ids.clamp_(max=10)))


class Residual(Decoder):
    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        before = x
        x += self.attend(nn.functional.layer_norm(x, (HIDDEN,)))
        return x + before


class Parts(Decoder):
    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.q(x), self.k(x), self.v(x)
        out = self.attention(q, k, v)
        q.mul_(2)
        k += 1
        return out + q * v + k


class ViewsOfOneTensor(Decoder):
    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        both = torch.cat([self.q(x), self.k(x)], dim=-1)
        q, k = both.chunk(2, dim=-1)
        out = self.attention(q, k, self.v(x))
        q.zero_()
        return out + both[:, :HIDDEN] + both[:, HIDDEN:]


class BetweenProducts(Decoder):
    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q = self.q(x)
        x.view(-1)[::2] = 0
        return self.attention(q, self.k(x), self.v(x)) + x


def dense_attention(self: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As the layer's, of one sequence, without a cache."""
    q, k, v = (t.view(-1, HEADS, SIZE).transpose(0, 1) for t in (q, k, v))
    mask = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    weights = (q @ k.transpose(1, 2) / SIZE**0.5).masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1).reshape(-1, HIDDEN)


MODELS = [AttentionsResult, Positions, TokenIds, Residual, Parts, ViewsOfOneTensor, BetweenProducts]


@pytest.mark.parametrize("model_class", MODELS)
@pytest.mark.parametrize(
    ("mode", "compiler", "merge"), [("PIECEWISE", "inductor", True), ("FULL", "eager", True), ("FULL", "eager", False)]
)
def test_logits_of_a_model_that_writes_in_place(
    model_class, mode: str, compiler: str, merge: bool, monkeypatch
) -> None:
    prompt = [11, 2, 33, 4]
    with monkeypatch.context() as plain, torch.no_grad():
        plain.setattr(Attention, "forward", dense_attention)
        expected = model_class()(torch.tensor(prompt), torch.arange(len(prompt)))[-1]
    runner = make_runner(mode, model=model_class(), compiler=compiler, merge_linears=merge, capture_sizes=[4])
    runner.execute([work("other", [5, 6], 0, [2])])
    for blocks in ([1], [3]):
        got = runner.execute([work("a", prompt, 0, blocks)])[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert not runner.report.reasons.codes(), [str(reason) for reason, _ in runner.report.reasons]


class Counter(Decoder):
    """Adds the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.attend(self.embed(ids)) + self.calls


@pytest.mark.parametrize(("mode", "compiler"), [("NONE", "eager"), ("PIECEWISE", "inductor"), ("FULL", "eager")])
def test_a_start_leaves_what_the_model_writes_as_it_was(mode: str, compiler: str, monkeypatch) -> None:
    prompt, model = [11, 2, 33, 4], Counter()
    model.calls.fill_(5)
    runner = make_runner(mode, model=model, compiler=compiler, capture_sizes=[4, 8])
    assert model.calls.item() == 5
    got = [runner.execute([work("a", prompt, 0, [1])])[0].clone() for _ in range(3)]
    assert model.calls.item() == 8
    plain = Counter()
    plain.calls.fill_(5)
    monkeypatch.setattr(Attention, "forward", dense_attention)
    with torch.no_grad():
        expected = [plain(torch.tensor(prompt), torch.arange(len(prompt)))[-1] for _ in range(3)]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_tensor_that_forward_assigns_is_named_as_one_value_too_many() -> None:
    class Assigns(Counter):
        def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return self.attend(self.embed(ids)) + self.calls

    with pytest.raises(ValueError, match=r"got 2 values.*assigns to an attribute"):
        make_runner("NONE", model=Assigns())


class Steps(Decoder):
    """Multiplies by the number of its calls, which it keeps as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.name, self.lazy = 0, "steps", None

    def run(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.lazy is None:  # what is made once and stays is no state
            self.lazy = 2
        return self.attend(self.embed(ids)) * self.calls * self.lazy


@pytest.mark.parametrize("cache", [False, True])
def test_a_number_that_forward_changes_is_reported_as_fixed(cache: bool, tmp_path) -> None:
    for _ in range(2):  # a program that depends on it is not read from disk either
        compiler = "inductor" if cache else "eager"
        runner = make_runner("FULL", model=Steps(), compiler=compiler, cache=cache, cache_dir=tmp_path)
        fixed = [str(r) for r, _ in runner.report.reasons if r.code is ReasonCode.STATE_FIXED]
        assert len(fixed) == 1
        assert "calls: forward changed it from 0 to 1" in fixed[0]
    assert ReasonCode.STATE_FIXED not in make_runner("FULL", model=Counter()).report.reasons.codes()


def test_a_number_that_forward_changes_can_be_an_error() -> None:
    with pytest.raises(FallbackError, match="calls: forward changed it"):
        make_runner("FULL", model=Steps(), on_fallback="error")
