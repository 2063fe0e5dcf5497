"""This project's engine as a contender: one mode on one attention backend, for every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from piecewise_backend.runner import LLM, SamplingParams, ScheduledRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What all modes have in common."""

    options: dict[str, Any]
    max_num_reqs: int
    max_model_len: int
    chunk: int
    """Tokens of a step at most: prompts are computed in such chunks."""
    num_blocks: int | None = None
    vocab_size: int | None = None
    """None: as the model's config has it."""


class EngineLoop:
    """See `EagerLoop` for the methods."""

    def __init__(self, model: nn.Module, mode: str, backend: str | None, settings: EngineSettings) -> None:
        self.name, self.settings = f"{mode} {backend or 'auto'}", settings
        self.llm = LLM(
            model,
            device=next(model.parameters()).device,
            vocab_size=settings.vocab_size,
            mode=mode,
            options=settings.options,
            max_num_tokens=settings.chunk,
            max_num_reqs=settings.max_num_reqs,
            max_model_len=settings.max_model_len,
            num_blocks=settings.num_blocks,
            attention_backend=backend,
        )

    def begin(self, num_reqs: int, max_len: int) -> None:
        limits = self.settings
        assert num_reqs <= limits.max_num_reqs, f"{num_reqs} requests, made for {limits.max_num_reqs}"
        assert max_len <= limits.max_model_len, f"{max_len} tokens, made for {limits.max_model_len}"

    def forced_logits(self, prompts: torch.Tensor, num_prefill: int) -> torch.Tensor:
        share = max(1, self.settings.chunk // num_prefill)
        rows = list(range(len(prompts)))
        parts = [rows[start : start + share] for start in range(0, len(rows), share)]
        logits = [torch.cat([self._execute(prompts, part, 0, num_prefill) for part in parts])]
        logits += [self._execute(prompts, rows, index, index + 1) for index in range(num_prefill, prompts.shape[1])]
        return torch.stack(logits, dim=1)

    def prefill(self, prompts: torch.Tensor, new_tokens: int) -> None:
        """Serve `prompts` until each has its first token. Earlier ones are ahead by the steps that later ones took."""
        num_reqs, length = prompts.shape
        steps = prefill_steps(num_reqs, length, self.settings.chunk)
        params = SamplingParams(max_tokens=new_tokens + steps, ignore_eos=True)
        waiting = {self.llm.engine.add(prompt, params) for prompt in prompts.tolist()}
        while waiting:
            waiting -= {token.request_id for token in self.llm.engine.step()}

    def step(self) -> int:
        return len(self.llm.engine.step())

    def prefill_step(self, prompts: torch.Tensor) -> Callable[[], torch.Tensor]:
        works = _works(prompts, range(len(prompts)), 0, prompts.shape[1], self.llm.runner.config.block_size)
        return lambda: self.llm.runner.execute(works)

    def finish(self) -> None:
        while self.llm.engine.has_work:
            self.llm.engine.step()

    def facts(self) -> dict[str, Any]:
        report = self.llm.report
        return {
            "resolved": report.mode_resolved,
            "backend": sorted({group.backend for group in report.groups}),
            "captures": report.num_captures,
            "capture_seconds": sum(size.seconds for size in report.sizes),
            "capture_mib": sum(size.memory_bytes for size in report.sizes) / 2**20,
            "compile_seconds": report.compile_seconds,
            "replays": report.num_replays,
            "runs_without_graphs": report.uncaptured_runs,
            "reasons": [f"{reason.code}: {reason} (x{count})" for reason, count in report.reasons],
        }

    def _execute(self, prompts: torch.Tensor, rows: Sequence[int], start: int, stop: int) -> torch.Tensor:
        works = _works(prompts, rows, start, stop, self.llm.runner.config.block_size)
        return self.llm.runner.execute(works).clone()


def prefill_steps(num_reqs: int, length: int, chunk: int) -> int:
    """Engine steps, at most, from adding `num_reqs` prompts to the first token of the last."""
    room = max(1, chunk - num_reqs)  # requests that have their first token go on meanwhile
    return -(-num_reqs * length // room) + 2  # tokens of a step may come with the next


def _works(
    prompts: torch.Tensor, rows: Sequence[int], start: int, stop: int, block_size: int
) -> list[ScheduledRequest]:
    """Tokens `start` to `stop` of the prompts in `rows`, each in blocks of its own."""
    blocks = -(-prompts.shape[1] // block_size)
    return [
        ScheduledRequest(
            request_id=f"row-{row}",
            token_ids=prompts[row, start:stop].tolist(),
            num_computed_tokens=start,
            block_ids=tuple(range(row * blocks, (row + 1) * blocks)),
            is_decode=start > 0,
        )
        for row in rows
    ]
