"""Which tokens of which requests run in the next step: continuous batching with chunked prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from piecewise_backend.runner.batch import NO_STATE_SLOT, ScheduledRequest
from piecewise_backend.runner.block_pool import BlockPool
from piecewise_backend.runner.request import Request


class Scheduler:
    """First come, first served; running requests before waiting ones.

    A long prompt is computed in chunks that fill what the token budget leaves. When blocks run out, the request that
    came last gives all of its blocks back and is computed again later (preemption by recompute).

    num_draft_tokens: guesses of a request that a step verifies, at most. lookahead: tokens for which blocks are
    reserved beyond those of the step: a draft model writes there.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
        max_model_len: int,
        num_draft_tokens: int = 0,
        lookahead: int = 0,
        on_preempt: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self.pool = pool
        self.max_num_tokens = max_num_tokens
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.num_draft_tokens = num_draft_tokens
        self.lookahead = lookahead
        self._free_slots = deque(range(max_num_reqs))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._on_preempt = on_preempt

    def add(self, request: Request) -> None:
        """Queue a request. ValueError for one that could never run, even alone."""
        tokens = len(request.prompt_ids) + request.params.max_tokens + self.num_draft_tokens + self.lookahead
        needed = self.pool.blocks_for(min(tokens, self.max_model_len))
        if needed > self.pool.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} needs up to {needed} cache blocks of {self.pool.block_size} tokens, "
                f"and there are {self.pool.num_blocks}; shorten the prompt or max_tokens, or raise num_blocks"
            )
        self.waiting.append(request)

    def schedule(self) -> list[tuple[Request, ScheduledRequest]]:
        """The next step's requests, in order; empty when there is nothing to do."""
        budget = self.max_num_tokens
        scheduled: list[tuple[Request, ScheduledRequest]] = []
        preempted = False
        for request in list(self.running):
            if request not in self.running or budget == 0 or self._waits_for_its_end(request):
                continue
            while not self._reserve(request, count := min(budget, self._wanted(request))):
                preempted = True
                if self.preempt_last() is request:
                    break
            else:
                scheduled.append((request, _take(request, count)))
                budget -= count
        while self.waiting and budget and not preempted and len(self.running) < self.max_num_reqs:
            request = self.waiting[0]
            count = min(budget, self._wanted(request))
            # A preempted request is computed again from its tokens, so the host must know all of them.
            if request.awaits_token or not self._reserve(request, count):
                break
            request.state_slot = self._free_slots.popleft()
            self.running.append(self.waiting.popleft())
            scheduled.append((request, _take(request, count)))
            budget -= count
        return scheduled

    def finish(self, request: Request) -> None:
        """Take a request out, running or waiting, and free its blocks."""
        if request in self.running:
            self.running.remove(request)
            self._release_slot(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.pool.release(request.block_ids)
        request.block_ids = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def _waits_for_its_end(self, request: Request) -> bool:
        """Nothing is left to compute; it leaves when the host has its last token."""
        return request.is_complete or request.num_tokens >= self.max_model_len

    def _wanted(self, request: Request) -> int:
        """Tokens left to compute, guesses included as far as the longest sequence allows."""
        known = request.num_tokens - request.num_computed_tokens
        room = self.max_model_len - request.num_tokens
        return known + min(len(request.draft_ids), max(0, room))

    def _reserve(self, request: Request, count: int) -> bool:
        tokens = request.num_computed_tokens + count + self.lookahead
        return self.pool.extend(request.block_ids, min(tokens, self.max_model_len))

    def _release_slot(self, request: Request) -> None:
        self._free_slots.append(request.state_slot)
        request.state_slot = NO_STATE_SLOT

    def preempt_last(self) -> Request:
        """The request that came last gives way. Never one already scheduled in this step: those come earlier."""
        request = self.running[-1]
        self.compute_again([request])
        self._on_preempt(request)
        return request

    def compute_again(self, requests: Sequence[Request]) -> None:
        """Those of `requests` that are running give everything back and wait, to be computed again from their tokens:
        what they have in caches is not believed any more."""
        for request in reversed(requests):
            if request in self.running:
                self.running.remove(request)
                self._release_slot(request)
                self.pool.release(request.preempt())
                self.waiting.appendleft(request)


def advance(scheduled: Sequence[tuple[Request, ScheduledRequest]]) -> list[tuple[int, Request]]:
    """Note that a step was computed. Returns (position in the step, request) of those whose next token can be sampled.

    Draft tokens count as not computed: whoever verifies them adds the accepted ones.
    """
    ready = []
    for index, (request, work) in enumerate(scheduled):
        request.num_computed_tokens += len(work.token_ids) - work.num_draft_tokens
        if request.num_computed_tokens == request.num_tokens:
            ready.append((index, request))
    return ready


def _take(request: Request, count: int) -> ScheduledRequest:
    start = request.num_computed_tokens
    known = min(count, request.num_tokens - start)
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=[*request.tokens(start, start + known), *request.draft_ids[: count - known]],
        num_computed_tokens=start,
        block_ids=tuple(request.block_ids),
        is_decode=request.is_decode,
        state_slot=request.state_slot,
        num_draft_tokens=count - known,
    )
