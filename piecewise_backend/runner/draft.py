"""A smaller model that guesses for a larger one: its own program, caches and graphs; the same blocks and slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from piecewise_backend.config import parse_options
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.runner.batch import ScheduledRequest
from piecewise_backend.runner.draft_loop import DraftLoop
from piecewise_backend.runner.model_runner import ModelRunner
from piecewise_backend.runner.request import Request
from piecewise_backend.runner.speculation import Speculator

_CATCH_UP = 2
"""Tokens of a request that the draft model runs before it guesses: the newest, and the one before it, which is not in
its cache after a step whose guesses were all accepted. Always both, so that the batch is uniform."""


@dataclass(slots=True)
class _Progress:
    """What of a request is in the draft model's cache."""

    num_preemptions: int
    num_tokens: int
    """Tokens of the request that were there when it was last guessed for."""
    guesses: list[int]
    """What was guessed then; all but the last are in the cache too."""


class DraftModel(Speculator):
    """Guesses by running a smaller model greedily, one token after another.

    model: as for `ModelRunner`, with the same vocabulary. options: as for `torch.compile`; None: the target's.
    """

    def __init__(
        self, model: nn.Module, num_draft_tokens: int = 3, *, options: Mapping[str, Any] | None = None
    ) -> None:
        self.model = model
        self.options = None if options is None else parse_options(options)
        super().__init__(num_draft_tokens)
        self.lookahead = num_draft_tokens
        self._progress: dict[str, _Progress] = {}

    @property
    def method(self) -> str:
        return f"draft model {type(self.model).__name__}"

    def start(self, target: ModelRunner) -> None:
        """Resolve, compile and capture the draft model, for the target's blocks and limits."""
        config = dataclasses.replace(
            target.config,
            num_blocks=target.num_blocks,
            # Guesses are redone from the last but one right token on.
            num_draft_tokens=self.num_draft_tokens + 1,
            uniform_query_len=_CATCH_UP,
        )
        model = self.model.to(target.device)
        self.runner = ModelRunner(model, config, self.options or target.options, target.device)
        self.runner.start()
        self.loop = DraftLoop(self.runner, self.num_draft_tokens - 1)
        target.report.draft = self.runner.report
        self._vocab_size = self.runner.num_logits
        if self._vocab_size != target.num_logits:
            detail = f"has {self._vocab_size} tokens, the model it guesses for {target.num_logits}"
            hint = "nothing to do, if both have the same tokenizer; else take a draft model that has the target's"
            target.report.reasons.add(Reason(ReasonCode.VOCABULARIES_DIFFER, self.method, detail, hint))

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        guesses: dict[int, list[int]] = {id(r): [] for r in requests}
        guesses |= self._guesses([r for r in requests if self._knows(r)])
        return [guesses[id(request)] for request in requests]

    def _knows(self, request: Request) -> bool:
        """Whether every token that the draft model has yet to run is of its vocabulary."""
        return max(request.tokens(self._num_seen(request), request.num_tokens), default=0) < self._vocab_size

    def _guesses(self, requests: Sequence[Request]) -> dict[int, list[int]]:
        """By the id of each request."""
        if not requests:
            return {}
        first = self._catch_up(requests)
        columns = [first[:, None], self.loop.run([_after(r) for r in requests], first)]
        guesses = torch.cat(columns, dim=1).tolist()
        for request, row in zip(requests, guesses, strict=True):
            self._progress[request.request_id] = _Progress(request.num_preemptions, request.num_tokens, row)
        return dict(zip(map(id, requests), guesses, strict=True))

    def forget(self, request: Request) -> None:
        self._progress.pop(request.request_id, None)

    def _catch_up(self, requests: Sequence[Request]) -> torch.Tensor:
        """Run every token that the draft model has not seen, in as many steps as its limits ask for.

        Returns the first guess for each request, [R] int64 on the device.
        """
        starts = [min(self._num_seen(r), r.num_tokens - _CATCH_UP) for r in requests]
        found: dict[int, torch.Tensor] = {}
        while len(found) < len(requests):
            works, rows = self._next_step(requests, starts)
            logits = self.runner.execute(works)
            for row, index in enumerate(rows):
                starts[index] += len(works[row].token_ids)
                if starts[index] == requests[index].num_tokens:
                    found[index] = logits[row].argmax(dim=-1)
        return torch.stack([found[index] for index in range(len(requests))])

    def _next_step(
        self, requests: Sequence[Request], starts: Sequence[int]
    ) -> tuple[list[ScheduledRequest], list[int]]:
        """What fits into one step of the draft model, and which requests it belongs to."""
        budget, works, rows = self.runner.config.max_num_tokens, [], []
        for index, (request, start) in enumerate(zip(requests, starts, strict=True)):
            count = min(budget, request.num_tokens - start)
            if count > 0:
                is_decode = start > 0 and request.num_tokens - start == _CATCH_UP
                works.append(_work(request, start, count, is_decode=is_decode and count == _CATCH_UP))
                rows.append(index)
                budget -= count
        return works, rows

    def _num_seen(self, request: Request) -> int:
        """Tokens of the request, as it is now, that are in the draft model's cache."""
        progress = self._progress.get(request.request_id)
        if progress is None or progress.num_preemptions != request.num_preemptions:
            return 0
        seen = progress.num_tokens
        since = request.tokens(seen, request.num_tokens)
        for token, guess in zip(since, progress.guesses[:-1], strict=False):
            if token != guess:
                break
            seen += 1
        return seen


def _work(request: Request, start: int, count: int, *, is_decode: bool) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=request.tokens(start, start + count),
        num_computed_tokens=start,
        block_ids=tuple(request.block_ids),
        is_decode=is_decode,
        state_slot=request.state_slot,
    )


def _after(request: Request) -> ScheduledRequest:
    """The token after the request's last one: its id is on the device."""
    return dataclasses.replace(
        _work(request, 0, 0, is_decode=True), token_ids=[0], num_computed_tokens=request.num_tokens
    )
