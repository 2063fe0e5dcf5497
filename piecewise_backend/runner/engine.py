"""The loop: schedule, execute, sample, until every request has finished."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.runner.batch import ScheduledRequest
from piecewise_backend.runner.block_pool import BlockPool
from piecewise_backend.runner.model_runner import ModelRunner
from piecewise_backend.runner.request import UNKNOWN_TOKEN, Request, SamplingParams
from piecewise_backend.runner.sampling import Sampler
from piecewise_backend.runner.scheduler import Scheduler, advance


@dataclass(frozen=True, slots=True)
class NewToken:
    """One token of one request, as it is sampled."""

    request_id: str
    token_id: int
    finish_reason: str | None
    """None while the request goes on; "stop" or "length" with its last token."""


@dataclass(slots=True)
class _Step:
    """A forward pass that was launched, and those of its requests that get a token by it."""

    requests: list[Request]
    works: list[ScheduledRequest]
    logits: torch.Tensor
    """[rows, vocabulary]: see `Sampler.sample`."""
    tokens: OnTheWay | None = None
    places: list[int] = field(default_factory=list)
    """Where in the output of each request its token belongs."""


class OnTheWay:
    """Tokens [R] int64 on their way from the device to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tokens = tokens
        if tokens.device.type == "cuda":
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[int]:
        """The tokens; waits for the work before them only, not for what was launched since."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.tolist()


class Engine:
    """Serves requests in one continuous batch, a step at a time.

    engine.add([1, 2, 3], SamplingParams(max_tokens=8))
    while engine.has_work:
        for token in engine.step(): ...
    """

    def __init__(self, runner: ModelRunner, *, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        """`runner`: a started one."""
        self.runner = runner
        self.speculator = runner.speculator
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        config = runner.config
        self.scheduler = Scheduler(
            BlockPool(runner.num_blocks, config.block_size),
            max_num_tokens=config.max_num_tokens,
            max_num_reqs=config.max_num_reqs,
            max_model_len=config.max_model_len,
            num_draft_tokens=config.num_draft_tokens,
            lookahead=0 if self.speculator is None else self.speculator.lookahead,
            on_preempt=self._note_preemption,
        )
        self.sampler = Sampler(runner.device)
        self._requests: dict[str, Request] = {}
        self._count = 0
        self._others_may_work = True
        self._in_flight: _Step | None = None

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished; with data parallelism, on any rank as far as the last step told."""
        others = self.runner.data_parallel is not None and self._others_may_work
        return self.scheduler.has_work or self._awaits_tokens or others

    @property
    def _awaits_tokens(self) -> bool:
        return self._in_flight is not None and any(r.finish_reason is None for r in self._in_flight.requests)

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queue a prompt; returns its request id. ValueError for a prompt that cannot be served, and only for it."""
        if request_id is None:
            request_id = self._new_id()
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use; finish or abort it first")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be a SamplingParams, got {type(params).__name__}")
        request = Request(request_id, self._checked(prompt_ids), params)
        self.scheduler.add(request)
        self._requests[request_id] = request
        return request_id

    def _new_id(self) -> str:
        """One that no request being served has."""
        while (request_id := f"request-{self._count}") in self._requests:
            self._count += 1
        self._count += 1
        return request_id

    def step(self) -> list[NewToken]:
        """Run one forward pass over what fits; returns new tokens, in batch order.

        The device works on this step while the host reads what the step before sampled: those tokens are returned,
        and a request that ends by them has had one step too many, whose token is dropped. With a speculator the host
        needs each step's tokens to guess the next ones, so a step returns its own.

        A step that raises is as if it had not been: its requests are computed again from their tokens, by later steps.
        """
        scheduled = self.scheduler.schedule()
        try:
            launched = self._launch(scheduled)
            if self.speculator is not None:
                return [] if launched is None else self._verify(launched)
            if launched is not None:
                self._send_tokens(launched)
        except BaseException:
            self.scheduler.compute_again([request for request, _ in scheduled])
            raise
        before, self._in_flight = self._in_flight, launched
        return [] if before is None else self._receive(before)

    def _launch(self, scheduled: Sequence[tuple[Request, ScheduledRequest]]) -> _Step | None:
        """Launch a forward pass; None where nothing came of it that could be sampled."""
        self._others_may_work = True
        if not scheduled:
            if self.runner.data_parallel is not None:
                self._others_may_work = self.runner.execute_idle()
            return None
        works = [work for _, work in scheduled]
        logits = self.runner.execute(works)
        ready = advance(scheduled)
        if not ready:
            return None
        rows = [index for index, _ in ready]
        if len(ready) < len(scheduled):
            logits = logits[_rows_of(works, rows)]
        return _Step([request for _, request in ready], [works[index] for index in rows], logits)

    def _send_tokens(self, step: _Step) -> None:
        """Sample on the device, keep the tokens there for the next step, and send them to the host meanwhile."""
        tokens = self.sampler.choose(step.logits, step.requests)
        self.runner.keep_tokens(step.works, tokens)
        step.tokens = OnTheWay(tokens)
        for request in step.requests:
            step.places.append(len(request.output_ids))
            request.output_ids.append(UNKNOWN_TOKEN)

    def _receive(self, step: _Step) -> list[NewToken]:
        """Put the tokens of an earlier step in their places, and see who has finished."""
        assert step.tokens is not None
        new = []
        for request, place, token_id in zip(step.requests, step.places, step.tokens.wait(), strict=True):
            if request.finish_reason is not None:
                continue  # it ended, or was aborted, while this step ran
            request.output_ids[place] = token_id
            self._check_end(request, token_id, place + 1)
            if request.finish_reason is not None:
                del request.output_ids[place + 1 :]
            new.append(NewToken(request.request_id, token_id, request.finish_reason))
        return new

    def _verify(self, step: _Step) -> list[NewToken]:
        """Accept or reject the guesses of a step, and guess anew."""
        drafts = [r.draft_ids[: w.num_draft_tokens] for r, w in zip(step.requests, step.works, strict=True)]
        sampled = self.sampler.sample(step.logits, step.requests, drafts)
        tokens = [t for r, new, d in zip(step.requests, sampled, drafts, strict=True) for t in self._accept(r, new, d)]
        self._guess([r for r in step.requests if r.finish_reason is None])
        return tokens

    def rejoin(self) -> None:
        """Expect other data-parallel ranks to have work again: `has_work` is true until a step shows that none has."""
        self._others_may_work = True

    def drain(self) -> None:
        """Take part in the steps of other data-parallel ranks until none has work. Without them: nothing to do."""
        while self.runner.data_parallel is not None and not self.scheduler.has_work and self.has_work:
            self.step()

    def abort(self, request_id: str) -> None:
        """Stop serving a request. KeyError for one that is not being served."""
        request = self._requests.get(request_id)
        if request is None:
            raise KeyError(f"no request {request_id!r} is being served; it has finished, or never was")
        self._finish(request, "aborted")

    def _accept(self, request: Request, token_ids: Sequence[int], drafts: Sequence[int]) -> list[NewToken]:
        """Append the tokens of one step, as far as the request goes on. `drafts`: the guesses that were verified."""
        new: list[NewToken] = []
        for token_id in token_ids:
            request.output_ids.append(token_id)
            self._check_end(request, token_id, len(request.output_ids))
            new.append(NewToken(request.request_id, token_id, request.finish_reason))
            if request.finish_reason is not None:
                break
        request.num_computed_tokens += len(new) - 1  # the accepted guesses are in the cache
        if self.speculator is not None:
            self.speculator.report.proposed += len(drafts)
            self.speculator.report.accepted += len(token_ids) - 1
        return new

    def _check_end(self, request: Request, token_id: int, num_output: int) -> None:
        """Finish a request whose `num_output`-th token, `token_id`, is its last."""
        params = request.params
        stops = token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos)
        is_full = len(request.prompt_ids) + num_output >= self.runner.config.max_model_len
        if stops or num_output >= params.max_tokens or is_full:
            self._finish(request, "stop" if stops else "length")

    def _guess(self, requests: Sequence[Request]) -> None:
        assert self.speculator is not None
        longest = self.runner.config.max_model_len
        for request in requests:
            request.draft_ids = []
        # A sequence near its longest goes on without guesses: it has no room for all of them.
        requests = [r for r in requests if r.num_tokens + self.speculator.num_draft_tokens <= longest]
        for request, guesses in zip(requests, self.speculator.propose(requests), strict=True):
            # A token that the model does not know ends the guesses.
            request.draft_ids = list(itertools.takewhile(lambda token: 0 <= token < self.vocab_size, guesses))

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self.scheduler.finish(request)
        self.sampler.forget(request)
        if self.speculator is not None:
            self.speculator.forget(request)
        del self._requests[request.request_id]

    def _checked(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """The token ids of a prompt that can be served. ValueError for another."""
        try:
            prompt_ids = tuple(operator.index(t) for t in prompt_ids)
        except TypeError as error:
            raise ValueError(f"a prompt must be a sequence of integers: {error}") from error
        longest = self.runner.config.max_model_len - 1
        if not len(prompt_ids):
            raise ValueError(
                "a prompt needs at least one token, got none; prepend the model's start token if it has one"
            )
        if len(prompt_ids) > longest:
            raise ValueError(
                f"a prompt of {len(prompt_ids)} tokens is too long: at most {longest} fit with one new token into "
                f"max_model_len={longest + 1}; shorten it or raise max_model_len"
            )
        wrong = [t for t in prompt_ids if not 0 <= t < self.vocab_size]
        if wrong:
            raise ValueError(
                f"token ids must be from 0 to {self.vocab_size - 1}, got {wrong[:5]}; was the prompt encoded with "
                "another model's tokenizer?"
            )
        return prompt_ids

    def _note_preemption(self, request: Request) -> None:
        self.runner.report.reasons.add(
            Reason(
                ReasonCode.PREEMPTED,
                "requests",
                "gave their cache blocks back and were computed again",
                "raise num_blocks, or lower max_num_reqs",
            )
        )


def _rows_of(works: Sequence[ScheduledRequest], wanted: Sequence[int]) -> list[int]:
    """Rows of logits that belong to the `wanted` of a step's requests."""
    starts = [0, *itertools.accumulate(work.num_draft_tokens + 1 for work in works)]
    return [row for index in wanted for row in range(starts[index], starts[index + 1])]
