"""A small decoder with every kind of layer that keeps caches, and running it against itself in another mode.

Rows are computed one by one (no matrix product that a library might tile by the number of rows), so that the same
tokens give the same bits whatever the padding.
"""

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import logsigmoid, normalize, rms_norm, silu

from attention.layers import Attention, CompressedAttention, LinearAttention, ShortConv
from piecewise_backend.runner import Engine, ModelRunner, SamplingParams
from tests.tiny import HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, VOCAB, make_runner

KEY, VALUE = 16, 16


class RowLinear(nn.Module):
    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in) / fan_in**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, None, :] * self.weight).sum(-1)


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = RowLinear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_SIZE)
        self.attention = Attention(HEADS, HEAD_SIZE, num_kv_heads=KV_HEADS)
        self.out = RowLinear(HEADS * HEAD_SIZE, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split([HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE], dim=-1)
        return self.out(self.attention(q.contiguous(), k.contiguous(), v.contiguous()))


class LinearAttentionBlock(nn.Module):
    """As in gated delta networks: a short convolution, then the recurrence."""

    def __init__(self, num_heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.width = num_heads, num_heads * KEY
        self.qkv = RowLinear(HIDDEN, 2 * self.width + num_heads * VALUE)
        self.conv = ShortConv(2 * self.width + num_heads * VALUE, 4, silu=True)
        self.gates = RowLinear(HIDDEN, 2 * num_heads)
        self.attention = LinearAttention(num_heads, KEY, VALUE)
        self.out = RowLinear(num_heads * VALUE, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.conv(self.qkv(x)).split([self.width, self.width, self.num_heads * VALUE], dim=-1)
        q, k = (normalize(t.reshape(-1, self.num_heads, KEY), dim=-1).flatten(1) for t in (q, k))
        decay, beta = self.gates(x).chunk(2, dim=-1)
        return self.out(self.attention(q, k, v.contiguous(), logsigmoid(decay + 2), beta.sigmoid()))


class CompressedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = RowLinear(HIDDEN, HEADS * HEAD_SIZE)
        self.latents = RowLinear(HIDDEN, 3 * HEAD_SIZE)
        self.attention = CompressedAttention(HEADS, HEAD_SIZE, window=6, ratio=4)
        self.out = RowLinear(HEADS * HEAD_SIZE, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latent, kv, score = (t.contiguous() for t in self.latents(x).chunk(3, dim=-1))
        return self.out(self.attention(self.query(x), latent, kv, score))


class HybridDecoder(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        blocks = [AttentionBlock, LinearAttentionBlock, CompressedBlock, LinearAttentionBlock, AttentionBlock]
        self.blocks = nn.ModuleList(block() for block in blocks)
        self.up, self.down = RowLinear(HIDDEN, 64), RowLinear(64, HIDDEN)
        self.head = RowLinear(HIDDEN, VOCAB)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(rms_norm(x, (HIDDEN,)))
            x = x + self.down(silu(self.up(rms_norm(x, (HIDDEN,)))))
        return rms_norm(x, (HIDDEN,))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


def make_hybrid_runner(mode: str, **settings: object) -> ModelRunner:
    return make_runner(mode, model=HybridDecoder(), **{"capture_sizes": [2, 6, 16, 32], **settings})


def all_caches(runner: ModelRunner) -> dict[str, torch.Tensor]:
    """Every cache of every layer, by layer and name, without the block that is nobody's."""
    return {
        f"{layer}.{name}": getattr(runner.layers[layer], name)[: runner.num_blocks if cache.per == "block" else None]
        for layer, spec in runner.specs.items()
        for name, cache in spec.caches().items()
    }


def random_steps(
    runner: ModelRunner, steps: int, seed: int = 0, after_step: Callable[[int], None] = lambda step: None
) -> dict[str, list[int]]:
    """Serve requests that come and go at random: prefill, chunked prefill and decode mixed; preemption and aborts.

    What comes and goes depends on `seed` alone, never on the tokens. Returns the tokens of each request.
    """
    rng, engine = random.Random(seed), Engine(runner, vocab_size=VOCAB)
    tokens: dict[str, list[int]] = {}
    for step in range(steps):
        if rng.random() < 0.35:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 5, 17, 40, 70]))]
            engine.add(prompt, SamplingParams(max_tokens=rng.randint(1, 25)), f"r{step}")
        if rng.random() < 0.05 and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt_last()
        if rng.random() < 0.03 and engine.scheduler.running:
            engine.abort(rng.choice(engine.scheduler.running).request_id)
        for token in engine.step():
            tokens.setdefault(token.request_id, []).append(token.token_id)
        after_step(step)
    return tokens
