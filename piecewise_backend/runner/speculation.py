"""Guesses of what comes next, verified by the model in one step: more tokens a step, the same tokens in all.

A speculator guesses the same number of tokens for each request in each step, so decode batches stay uniform (every
request has 1 + that many tokens) and are served by graphs of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from piecewise_backend.reporting.records import SpeculationReport
from piecewise_backend.runner.request import Request

if TYPE_CHECKING:
    from piecewise_backend.runner.model_runner import ModelRunner


class Speculator(ABC):
    """Guesses tokens. `start` is called once, when the model it guesses for has started; `report` is part of that
    model's report."""

    num_draft_tokens: int
    """Guesses for each request in each step."""
    lookahead: int = 0
    """Cache positions that guessing itself writes beyond those of a step."""

    def __init__(self, num_draft_tokens: int) -> None:
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be at least 1, got {num_draft_tokens}")
        self.num_draft_tokens = num_draft_tokens
        self.report = SpeculationReport(method=self.method, num_draft_tokens=num_draft_tokens)

    @property
    @abstractmethod
    def method(self) -> str:
        """What the report calls it."""

    def start(self, target: ModelRunner) -> None:  # noqa: B027 (most have nothing to do)
        """Get ready to guess for `target`, which has resolved its modes and captured its graphs."""

    @abstractmethod
    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        """`num_draft_tokens` guesses for each request, whose last token has just been sampled."""

    def forget(self, request: Request) -> None:  # noqa: B027
        """Drop what is kept about a finished request."""


class PromptLookup(Speculator):
    """Guesses that what followed the last few tokens earlier in the request follows them again.

    The longest of `max_ngram` tokens that occurred before decides, its latest occurrence first. Where nothing
    occurred before, or too little followed, the last token is guessed to repeat. After "prompt lookup decoding"
    (https://github.com/apoorvumang/prompt-lookup-decoding).
    """

    def __init__(self, num_draft_tokens: int = 3, *, max_ngram: int = 3) -> None:
        if max_ngram < 1:
            raise ValueError(f"max_ngram must be at least 1, got {max_ngram}")
        self.max_ngram = max_ngram
        super().__init__(num_draft_tokens)

    @property
    def method(self) -> str:
        return f"prompt lookup of {self.max_ngram}"

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
        return [self._look_up(r.tokens(0, r.num_tokens)) for r in requests]

    def _look_up(self, tokens: Sequence[int]) -> list[int]:
        tokens, wanted = list(tokens), self.num_draft_tokens
        for length in range(min(self.max_ngram, len(tokens) - 1), 0, -1):
            tail = tokens[-length:]
            for start in range(len(tokens) - length - 1, -1, -1):
                if tokens[start : start + length] == tail:
                    found = tokens[start + length : start + length + wanted]
                    return found + [found[-1]] * (wanted - len(found))
        return [tokens[-1]] * wanted
