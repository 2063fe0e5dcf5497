"""A decoder small enough to test with, built from our layers; and what it must compute, written plainly."""

import random

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, silu

from attention.layers import Attention
from piecewise_backend.config import parse_options
from piecewise_backend.runner import (
    DataParallel,
    Engine,
    ModelRunner,
    RunnerConfig,
    SamplingParams,
    ScheduledRequest,
    Speculator,
)

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE = 97, 32, 4, 2, 16


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_SIZE, bias=False)
        self.attention = Attention(HEADS, HEAD_SIZE, num_kv_heads=KV_HEADS)
        self.out = nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 64, bias=False), nn.Linear(64, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(rms_norm(x, (HIDDEN,))).split(
            [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE], dim=-1
        )
        x = x + self.out(self.attention(q.contiguous(), k.contiguous(), v.contiguous()))
        return x + self.down(silu(self.up(rms_norm(x, (HIDDEN,)))))


class TinyDecoder(nn.Module):
    """Learned positions, so that a wrong position shows."""

    def __init__(self, num_layers: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(512, HIDDEN)
        self.layers = nn.ModuleList(TinyLayer() for _ in range(num_layers))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        return rms_norm(x, (HIDDEN,))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


@torch.no_grad()
def oracle_logits(model: TinyDecoder, token_ids: list[int]) -> torch.Tensor:
    """Logits [len(token_ids), VOCAB] of one sequence: dense causal attention, no cache, no batch."""
    device = model.head.weight.device
    ids = torch.tensor(token_ids, device=device)
    count = len(token_ids)
    x = model.embed(ids) + model.positions(torch.arange(count, device=device))
    mask = torch.ones(count, count, dtype=torch.bool, device=device).tril()
    for layer in model.layers:
        q, k, v = linear(rms_norm(x, (HIDDEN,)), layer.qkv.weight).split([64, 32, 32], dim=-1)
        q = q.view(count, HEADS, HEAD_SIZE).transpose(0, 1)
        k, v = (t.view(count, KV_HEADS, HEAD_SIZE).repeat_interleave(2, dim=1).transpose(0, 1) for t in (k, v))
        weights = (q @ k.transpose(1, 2) / HEAD_SIZE**0.5).masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + layer.out((weights @ v).transpose(0, 1).reshape(count, -1))
        x = x + layer.down(silu(layer.up(rms_norm(x, (HIDDEN,)))))
    return model.head(rms_norm(x, (HIDDEN,)))


def oracle_greedy(model: TinyDecoder, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that greedy decoding adds to `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def make_runner(
    mode: str = "FULL_AND_PIECEWISE",
    *,
    model: nn.Module | None = None,
    device: str = "cpu",
    speculator: Speculator | None = None,
    data_parallel: DataParallel | None = None,
    **settings: object,
) -> ModelRunner:
    """A started runner of a tiny decoder, emulated recorder, pieces as traced; settings of both kinds by name."""
    limits = {"max_num_tokens": 32, "max_num_reqs": 6, "max_model_len": 128, "block_size": 16}
    options: dict[str, object] = {"mode": mode, "recorder": "emulated", "compiler": "eager", "cache": False}
    for name, value in settings.items():
        (limits if name in RunnerConfig.__dataclass_fields__ else options)[name] = value
    module = (model or TinyDecoder()).to(device)
    where = torch.device(device)
    runner = ModelRunner(
        module,
        RunnerConfig(**limits),
        parse_options(options),
        where,
        speculator=speculator,
        data_parallel=data_parallel,
    )
    runner.start()
    return runner


def work(
    request_id: str,
    token_ids: list[int],
    computed: int,
    blocks: list[int],
    *,
    is_decode: bool = False,
    state_slot: int = -1,
    num_draft_tokens: int = 0,
) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request_id,
        token_ids=token_ids,
        num_computed_tokens=computed,
        block_ids=blocks,
        is_decode=is_decode,
        state_slot=state_slot,
        num_draft_tokens=num_draft_tokens,
    )


def serve_at_random(engine: Engine, model: TinyDecoder, steps: int = 100) -> None:
    """Let requests come at random while others are served; each must get the tokens it would get alone."""
    rng = random.Random(3)
    prompts: dict[str, list[int]] = {}
    tokens: dict[str, list[int]] = {}
    for step in range(steps):
        if rng.random() < 0.3:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 50))]
            prompts[engine.add(prompt, SamplingParams(max_tokens=rng.randint(1, 10)), f"r{step}")] = prompt
        for token in engine.step():
            tokens.setdefault(token.request_id, []).append(token.token_id)
    while engine.has_work:
        for token in engine.step():
            tokens.setdefault(token.request_id, []).append(token.token_id)
    assert prompts.keys() == tokens.keys()
    for name, prompt in prompts.items():
        assert tokens[name] == oracle_greedy(model, prompt, len(tokens[name])), f"{name}: prompt of {len(prompt)}"
