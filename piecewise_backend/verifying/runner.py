"""Cases of a runner: every captured descriptor, with a batch made for it or one that is given."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from attention.forward_context import set_forward_context
from piecewise_backend.cudagraph.capture import CapturedProgram, capture_session
from piecewise_backend.cudagraph.fingerprint import check_all
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.program import Program, followed
from piecewise_backend.runner.batch import InputBatch, ScheduledRequest
from piecewise_backend.runner.model_runner import ModelRunner
from piecewise_backend.verifying.case import Case

_CONTEXT = 3
"""Tokens that requests of a made-up batch have in the cache already, where there is room."""


def cases_of(runner: ModelRunner, requests: Sequence[ScheduledRequest] | None) -> list[Case]:
    """One case for each captured descriptor, or for the one that serves `requests`; one without graphs where none is
    captured. ValueError for requests beyond the runner's limits."""
    if requests is not None:
        if wrong := [type(r).__name__ for r in requests if not isinstance(r, ScheduledRequest)]:
            raise TypeError(f"a runner is verified with a list of ScheduledRequest, or None; got {wrong[0]}")
        batch = InputBatch.make(requests)
        batch.check_limits(runner.config, needs_state_slots=runner.has_states)
        found = runner.manager.dispatch(batch.num_tokens, batch.num_reqs, batch.uniform_query_len)
        descriptor = found or BatchDescriptor(mode=CUDAGraphMode.NONE, num_tokens=batch.num_tokens)
        return [_Pass(runner, descriptor, batch).case()]
    descriptors = list(runner.manager.captured) or [
        BatchDescriptor(mode=CUDAGraphMode.NONE, num_tokens=runner.config.max_num_tokens)
    ]
    return [_Pass(runner, d, batch_for(runner, d)).case() for d in descriptors]


def batch_for(runner: ModelRunner, descriptor: BatchDescriptor) -> InputBatch:
    """A batch that fills `descriptor`: real blocks and slots, which are given back as they were; or, where the cache
    has too few, a dummy one, which writes to no cache."""
    config = runner.config
    num_reqs = descriptor.num_reqs or min(descriptor.num_tokens, config.max_num_reqs)
    share, extra = divmod(descriptor.num_tokens, num_reqs)
    requests, next_block = [], 0
    for index in range(num_reqs):
        length = share + (index < extra)
        computed = max(0, min(_CONTEXT, config.max_model_len - length))
        count = -(-(computed + length) // config.block_size)
        requests.append(
            ScheduledRequest(
                request_id=f"verify-{index}",
                token_ids=[0] * length,
                num_computed_tokens=computed,
                block_ids=range(next_block, next_block + count),
                is_decode=descriptor.uniform_query_len is not None,
                state_slot=index if runner.has_states else -1,
            )
        )
        next_block += count
    batch = InputBatch.make(requests)
    if next_block > runner.num_blocks or batch.max_seq_len > config.max_model_len:
        return InputBatch.make_dummy(descriptor, max_num_reqs=config.max_num_reqs, max_model_len=config.max_model_len)
    return batch


class _Pass:
    """One descriptor and one batch for it."""

    def __init__(self, runner: ModelRunner, descriptor: BatchDescriptor, batch: InputBatch) -> None:
        self.runner, self.descriptor = runner, descriptor
        self.captured = runner.manager.captured.get(descriptor)
        self.program = runner.bound.program
        if self.captured is not None and len(self.captured.outputs) > len(self.program.outputs):
            self.program = followed(self.program, runner.compute_logits, "logits")
        self.batch = self._with_tokens(batch)
        is_mode_none = descriptor.mode is CUDAGraphMode.NONE
        self.recorded = frozenset() if is_mode_none else runner.resolved.kind_of(descriptor).recorded_layers
        self.metadata: dict[str, Any] = {}
        self.args = runner.bound.args_for(descriptor.num_tokens)
        self.paged = self._paged_caches()

    def case(self) -> Case:
        return Case(
            size=str(self.descriptor),
            program=self.program,
            args=self.args,
            fill=self._filled,
            visible=self._visible,
            rows=self._real_rows,
            captured=self.captured,
            recorder=self.runner.manager.recorder,
            record=self._record,
            before_replay=self._check_metadata,
        )

    @contextlib.contextmanager
    def _filled(self) -> Iterator[None]:
        runner, num_tokens = self.runner, self.descriptor.num_tokens
        runner.state.prepare_inputs(self.batch, num_tokens)
        self.metadata = runner.state.prepare_attn(self.batch, self.descriptor, recorded_layers=self.recorded)
        with set_forward_context(runner.context(self.metadata, num_tokens)):
            yield

    def _record(self, program: Program) -> CapturedProgram:
        runner = self.runner
        assert runner.manager.recorder is not None
        bound = dataclasses.replace(runner.bound, program=program)
        with capture_session(runner.manager.recorder):
            captured = runner.create_forward_fn(self.descriptor, False, bound)()
        assert captured is not None, "a recording returned nothing"
        return captured

    def _check_metadata(self) -> None:
        assert self.captured is not None
        check_all(self.captured.fingerprints, self.metadata)

    def _real_rows(self, value: Any, fake: Any) -> Any:
        return self.runner.bound.dim.narrow(value, fake, self.batch.num_tokens)

    def _visible(self, slot: int, value: torch.Tensor) -> torch.Tensor:
        return value[: self.runner.num_blocks] if slot in self.paged else value

    def _paged_caches(self) -> frozenset[int]:
        """Inputs that are caches with a last block that is nobody's, where padding is written."""
        runner = self.runner
        addresses = {
            getattr(runner.layers[layer], name).data_ptr()
            for layer, spec in runner.specs.items()
            for name, cache in spec.caches().items()
            if cache.per == "block"
        }
        return frozenset(
            i for i, a in enumerate(self.args) if isinstance(a, torch.Tensor) and a.data_ptr() in addresses
        )

    def _with_tokens(self, batch: InputBatch) -> InputBatch:
        """A made-up batch with tokens that differ from one another, below the vocabulary's size."""
        if not batch.is_dummy and not all(r.request_id.startswith("verify-") for r in batch.requests):
            return batch
        rng = np.random.default_rng(0)
        limit = min(_embeddings(self.runner.model), 1 << 16)
        requests = [
            dataclasses.replace(r, token_ids=rng.integers(limit, size=len(r.token_ids)).tolist())
            for r in batch.requests
        ]
        return InputBatch.make(requests, is_dummy=batch.is_dummy)


def _embeddings(model: torch.nn.Module) -> int:
    """Rows of the smallest embedding: ids below are valid, whatever the model calls its vocabulary."""
    return min((m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)), default=1)
