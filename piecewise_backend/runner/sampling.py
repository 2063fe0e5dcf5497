"""Logits to tokens, and the verification of guessed ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from piecewise_backend.runner.request import Request


class Sampler:
    """Chooses tokens, and verifies guesses; keeps the random state of requests that have a seed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generators: dict[str, torch.Generator] = {}

    def sample(
        self, logits: torch.Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]] | None = None
    ) -> list[list[int]]:
        """New tokens of each request, at least one. Waits for the device.

        logits [R, vocabulary], any float dtype: for each request in order, a row for each of its `drafts` and one more.
        Guesses are accepted from the first on until one is wrong; then comes one token of the model's own. Greedy
        requests accept what they would have chosen. Others accept guess d with probability p(d) and, where it is
        rejected, draw from p without d, which leaves the model's distribution as it is: speculative sampling
        (https://arxiv.org/abs/2302.01318, theorem 1) for a draft distribution that is certain of its guess.
        """
        given: Sequence[Sequence[int]] = drafts or [()] * len(requests)
        found = self.choose(logits, requests, given).tolist()
        starts = [0, *itertools.accumulate(len(d) + 1 for d in given)]
        return [_until_wrong(found[a:b], d) for a, b, d in zip(starts, starts[1:], given, strict=False)]

    def choose(
        self, logits: torch.Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor:
        """A token for each row of `logits` (see `sample`), [R] int64 on the device: an accepted guess, or another."""
        tokens = logits.argmax(dim=-1)
        given: Sequence[Sequence[int]] = drafts or [()] * len(requests)
        starts = [0, *itertools.accumulate(len(d) + 1 for d in given)]
        rows = [r for r, request in enumerate(requests) if request.params.temperature > 0]
        if rows:
            chosen = [i for r in rows for i in range(starts[r], starts[r + 1])]
            drawn = self._draw(logits[chosen].float(), [requests[r] for r in rows], [given[r] for r in rows])
            tokens[torch.tensor(chosen, device=tokens.device)] = drawn
        return tokens

    def forget(self, request: Request) -> None:
        """Drop a finished request's random state."""
        self._generators.pop(request.request_id, None)

    def _draw(self, logits: torch.Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]]) -> torch.Tensor:
        """A token for each row: the guess of that row where it is accepted."""
        each = [(r, d) for r, given in zip(requests, drafts, strict=True) for d in (*given, None)]
        temperatures = torch.tensor([r.params.temperature for r, _ in each], dtype=torch.float32, device=logits.device)
        logits = logits / temperatures[:, None]
        logits = keep_top_k_top_p(logits, [r.params.top_k for r, _ in each], [r.params.top_p for r, _ in each])
        chances = torch.softmax(logits, dim=-1)
        noise = torch.stack([self._noise(r, logits.shape[1]) for r, _ in each])
        guessed = [row for row, (_, d) in enumerate(each) if d is not None]
        if not guessed:
            # argmax(p / Exp(1)) is distributed as p, and reads nothing back from the device.
            return (chances / noise).argmax(dim=-1)
        rows = torch.tensor(guessed, device=logits.device)
        guesses = torch.tensor([d for _, d in each if d is not None], device=logits.device)
        uniform = torch.cat([self._uniform(each[row][0]) for row in guessed])
        accepted = uniform < chances[rows, guesses]
        chances[rows, guesses] = 0
        drawn = (chances / noise).argmax(dim=-1)
        drawn[rows] = torch.where(accepted, guesses, drawn[rows])
        return drawn

    def _noise(self, request: Request, size: int) -> torch.Tensor:
        noise = torch.empty(size, dtype=torch.float32, device=self.device)
        return noise.exponential_(generator=self._generator(request)).clamp_(min=torch.finfo(torch.float32).tiny)

    def _uniform(self, request: Request) -> torch.Tensor:
        return torch.rand(1, device=self.device, generator=self._generator(request))

    def _generator(self, request: Request) -> torch.Generator | None:
        if request.params.seed is None:
            return None
        if request.request_id not in self._generators:
            self._generators[request.request_id] = torch.Generator(self.device).manual_seed(request.params.seed)
        return self._generators[request.request_id]


def _until_wrong(tokens: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The tokens up to and with the first that differs from its guess."""
    for index, (token, draft) in enumerate(zip(tokens, drafts, strict=False)):
        if token != draft:
            return list(tokens[: index + 1])
    return list(tokens)


def keep_top_k_top_p(logits: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """Logits [R, V] with everything outside of each row's top-k and nucleus set to -inf.

    The nucleus holds the fewest tokens, most likely first, whose probability reaches p; at least one.
    """
    size = logits.shape[-1]
    if not any(top_k) and all(p == 1 for p in top_p):
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    ranks = torch.arange(size, device=logits.device)
    limit = torch.tensor([k or size for k in top_k], device=logits.device)
    ordered = ordered.masked_fill(ranks >= limit[:, None], float("-inf"))
    before = torch.softmax(ordered, dim=-1).cumsum(dim=-1) - torch.softmax(ordered, dim=-1)
    nucleus = torch.tensor(list(top_p), dtype=logits.dtype, device=logits.device)
    ordered = ordered.masked_fill((before >= nucleus[:, None]) & (ranks > 0), float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ordered)
