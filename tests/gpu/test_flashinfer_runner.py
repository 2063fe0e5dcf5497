"""The FlashInfer backend in the runner, against the Triton backend."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

from attention.layers import Attention
from piecewise_backend.reasons import ReasonCode
from piecewise_backend.runner import Engine, ModelRunner, PromptLookup, SamplingParams, ScheduledRequest
from tests.tiny import make_runner

pytest.importorskip("flashinfer")
pytestmark = pytest.mark.gpu
VOCAB, HIDDEN, HEADS, HEAD_SIZE = 97, 128, 4, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2) * HEAD_SIZE, bias=False)
        self.attention = Attention(HEADS, HEAD_SIZE, num_kv_heads=1)
        self.out = nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Slices of the fused projection, not copies: the backend takes any row stride.
        q, k, v = self.qkv(rms_norm(x, (HIDDEN,))).unflatten(-1, (HEADS + 2, HEAD_SIZE)).split([HEADS, 1, 1], dim=-2)
        x = x + self.out(self.attention(q.contiguous(), k, v).flatten(-2))
        return x + self.down(silu(self.up(rms_norm(x, (HIDDEN,)))))


class Decoder(nn.Module):
    """`tests.tiny.TinyDecoder` at a head size that FlashInfer has, with embeddings so small that attention decides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(128, HIDDEN)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return rms_norm(x, (HIDDEN,))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


def make_decoder_runner(mode: str, backend: str, **settings: Any) -> ModelRunner:
    where = {"device": "cuda", "recorder": "cuda", "dtype": torch.bfloat16} | settings
    model = Decoder().to(where.pop("dtype"))
    return make_runner(mode, model=model, attention_backend=backend, **where)


def steps() -> Iterator[list[ScheduledRequest]]:
    """Prefill in chunks, decode, verification of guesses and all of it mixed, of three requests with fixed tokens."""
    rng = random.Random(0)
    tokens = {name: [rng.randrange(VOCAB) for _ in range(128)] for name in "abc"}
    blocks = {name: rng.sample(range(8 * k, 8 * k + 8), 8) for k, name in enumerate("abc")}
    done = dict.fromkeys("abc", 0)

    def step(*parts: tuple[str, int, bool, int]) -> list[ScheduledRequest]:
        work = []
        for name, count, is_decode, num_draft_tokens in parts:
            start, done[name] = done[name], done[name] + count
            work.append(
                ScheduledRequest(
                    request_id=name,
                    token_ids=tokens[name][start : start + count],
                    num_computed_tokens=start,
                    block_ids=blocks[name],
                    is_decode=is_decode,
                    num_draft_tokens=num_draft_tokens,
                )
            )
        return work

    yield step(("a", 13, False, 0))
    yield step(("a", 9, False, 0), ("b", 17, False, 0))
    yield step(("a", 1, True, 0), ("b", 1, True, 0), ("c", 30, False, 0))
    for _ in range(3):
        yield step(("a", 1, True, 0), ("b", 1, True, 0), ("c", 1, True, 0))
    yield step(("b", 1, True, 0))
    for _ in range(2):
        yield step(("a", 4, True, 3), ("b", 4, True, 3), ("c", 4, True, 3))
    yield step(("c", 4, True, 3), ("a", 20, False, 0), ("b", 1, True, 0))
    yield step(("a", 4, True, 3))


def logits_of(runner: ModelRunner) -> torch.Tensor:
    return torch.cat([runner.execute(requests).float().clone() for requests in steps()])


@pytest.fixture(scope="module")
def by_triton() -> torch.Tensor:
    return logits_of(make_decoder_runner("NONE", "triton"))


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "speculation"])
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_the_runner_gives_the_logits_that_it_gives_with_triton(
    mode: str, speculate: bool, by_triton: torch.Tensor
) -> None:
    runner = make_decoder_runner(mode, "flashinfer", speculator=PromptLookup(3) if speculate else None)
    torch.testing.assert_close(logits_of(runner), by_triton, atol=6e-2, rtol=0)
    report = runner.report
    assert report.mode_resolved == mode
    assert (report.num_replays > 0) == (mode != "NONE")
    assert ReasonCode.CAPTURE_FAILED not in report.reasons.codes()


PROMPTS: Sequence[list[int]] = [[5], [1, 2, 3, 1, 2, 3, 1, 2], list(range(12)), [7] * 9]


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "speculation"])
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_greedy_tokens_are_the_likeliest_within_rounding_by_triton(mode: str, speculate: bool) -> None:
    runner = make_decoder_runner(mode, "flashinfer", speculator=PromptLookup(3) if speculate else None)
    engine = Engine(runner, vocab_size=VOCAB)
    served: dict[str, list[int]] = {engine.add(p, SamplingParams(max_tokens=16)): [] for p in PROMPTS}
    while engine.has_work:
        for token in engine.step():
            served[token.request_id].append(token.token_id)
    reference = make_decoder_runner("NONE", "triton")
    for prompt, tokens in zip(PROMPTS, served.values(), strict=True):
        assert len(tokens) == 16
        whole = ScheduledRequest(
            request_id="whole",
            token_ids=[*prompt, *tokens[:-1]],
            num_computed_tokens=0,
            block_ids=list(range(8)),
            is_decode=False,
            num_draft_tokens=len(tokens) - 1,
        )
        logits = reference.execute([whole]).float()
        taken = logits[torch.arange(len(tokens)), torch.tensor(tokens, device=logits.device)]
        torch.testing.assert_close(taken, logits.max(dim=-1).values, atol=1.2e-1, rtol=0)
