"""A model that switches autocast on: the same logits as without graphs, compiler or merged products."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, silu

from attention.layers import Attention
from piecewise_backend.runner import ModelRunner
from tests.tiny import make_runner, work

HEADS, SIZE, VOCAB = 2, 16, 50


class AutocastDecoder(nn.Module):
    """One layer, all of it in bfloat16; its projections read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 32)
        self.q, self.k, self.v = (nn.Linear(32, HEADS * SIZE) for _ in range(3))
        self.attention = Attention(HEADS, SIZE)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, VOCAB)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            x = x + self.attention(self.q(x), self.k(x), self.v(x))
            logits = self.down(silu(self.gate(x)) * self.up(x))
        return logits.float()


@torch.no_grad()
def expected(model: AutocastDecoder, token_ids: list[int]) -> torch.Tensor:
    """Logits of the last token: dense attention, weights cast by hand."""

    def project(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())

    device = model.embed.weight.device
    x = model.embed(torch.tensor(token_ids, device=device))
    q, k, v = (project(m, x).view(-1, HEADS, SIZE).transpose(0, 1).float() for m in (model.q, model.k, model.v))
    mask = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool, device=device).tril()
    weights = (q @ k.transpose(1, 2) / SIZE**0.5).masked_fill(~mask, float("-inf")).softmax(-1)
    x = x + (weights @ v).transpose(0, 1).reshape(len(token_ids), -1).bfloat16()
    hidden = silu(project(model.gate, x)) * project(model.up, x)
    return project(model.down, hidden)[-1].float()


def check(runner: ModelRunner, model: AutocastDecoder) -> None:
    """Prefill of several lengths, and a decode step."""

    def assert_right(got: torch.Tensor, ids: list[int]) -> None:
        torch.testing.assert_close(got[0], expected(model, ids), atol=0.02, rtol=0.02)

    for ids in ([1, 2, 3], [4], list(range(9))):
        assert_right(runner.execute([work("a", ids, 0, [1])]), ids)
    runner.execute([work("a", [5, 6], 0, [1])])
    assert_right(runner.execute([work("a", [7], 2, [1], is_decode=True)]), [5, 6, 7])


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize(("mode", "compiler"), [("PIECEWISE", "inductor"), ("FULL", "eager")])
def test_logits_of_a_model_under_autocast(mode: str, compiler: str, merge: bool) -> None:
    model = AutocastDecoder()
    check(make_runner(mode, model=model, compiler=compiler, merge_linears=merge, capture_sizes=[4]), model)
