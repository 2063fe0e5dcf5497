"""Logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecewise_backend.runner.request import Request


class Sampler:
    """Chooses one token for each row; keeps the random state of requests that have a seed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generators: dict[str, torch.Generator] = {}

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """logits [R, vocabulary], any float dtype, one row a request. Returns R token ids."""
        tokens = logits.argmax(dim=-1)
        rows = [i for i, request in enumerate(requests) if request.params.temperature > 0]
        if rows:
            drawn = self._draw(logits[rows].float(), [requests[i] for i in rows])
            tokens[torch.tensor(rows, device=tokens.device)] = drawn
        return tokens.tolist()

    def forget(self, request: Request) -> None:
        """Drop a finished request's random state."""
        self._generators.pop(request.request_id, None)

    def _draw(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        temperatures = torch.tensor([r.params.temperature for r in requests], dtype=torch.float32, device=logits.device)
        logits = logits / temperatures[:, None]
        logits = keep_top_k_top_p(logits, [r.params.top_k for r in requests], [r.params.top_p for r in requests])
        noise = torch.stack([self._noise(r, logits.shape[1]) for r in requests])
        # argmax(p / Exp(1)) is distributed as p, and reads nothing back from the device.
        return (torch.softmax(logits, dim=-1) / noise).argmax(dim=-1)

    def _noise(self, request: Request, size: int) -> torch.Tensor:
        noise = torch.empty(size, dtype=torch.float32, device=self.device)
        return noise.exponential_(generator=self._generator(request)).clamp_(min=torch.finfo(torch.float32).tiny)

    def _generator(self, request: Request) -> torch.Generator | None:
        if request.params.seed is None:
            return None
        if request.request_id not in self._generators:
            self._generators[request.request_id] = torch.Generator(self.device).manual_seed(request.params.seed)
        return self._generators[request.request_id]


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
