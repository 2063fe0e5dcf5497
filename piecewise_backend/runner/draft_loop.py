"""Some decode steps of a draft model in a row: recorded as one graph where its attention allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from attention.forward_context import set_forward_context
from piecewise_backend.cudagraph.manager import CudaGraphManager
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.cudagraph.resolve import BatchKind, describe
from piecewise_backend.cudagraph.sizes import uniform_capture_sizes
from piecewise_backend.program import repeated
from piecewise_backend.runner.batch import InputBatch, ScheduledRequest
from piecewise_backend.runner.model_runner import ModelRunner


class DraftLoop:
    """Greedy decode of `num_steps` tokens for each request, without the host in between.

    Each step's token, position, sequence length and slot are derived on the device from the step before, in the
    runner's own buffers. That needs metadata that stays right meanwhile (`MetadataBuilder.advances_on_device`) for
    every group; otherwise the steps are run one by one.
    """

    def __init__(self, runner: ModelRunner, num_steps: int) -> None:
        self.runner = runner
        self.num_steps = num_steps
        self.guesses = torch.zeros(
            runner.config.max_num_reqs, max(1, num_steps), dtype=torch.int64, device=runner.device
        )
        self.on_device = num_steps > 0 and all(type(g.builder).advances_on_device for g in runner.groups)
        self.manager = CudaGraphManager(runner.manager.recorder, runner.report)
        if not self.on_device:
            return
        program = repeated(runner.bound.program, num_steps, self._advance)
        self.bound = dataclasses.replace(runner.bound, program=program)
        if (kind := self._kind()) is not None:
            descriptors = [describe(kind, size, runner.config.max_num_reqs) for size in reversed(kind.sizes)]
            self.manager.capture(
                descriptors, lambda d, warmup: runner.create_forward_fn(d, warmup, self.bound, num_steps - 1)
            )

    def run(self, works: Sequence[ScheduledRequest], first: torch.Tensor) -> torch.Tensor:
        """Guesses [num_reqs, num_steps] int64, on the device, that follow the tokens `first` [num_reqs] int64.

        `works`: one token for each request, whose id is taken from `first`.
        """
        if not self.num_steps:
            return self.guesses[: len(works), :0]
        return self._run_on_device(works, first) if self.on_device else self._run_one_by_one(works, first)

    def _run_on_device(self, works: Sequence[ScheduledRequest], first: torch.Tensor) -> torch.Tensor:
        runner, batch = self.runner, InputBatch.make(works)
        descriptor = self.manager.dispatch(batch.num_tokens, batch.num_reqs, 1)
        if descriptor is None:
            descriptor = BatchDescriptor(mode=CUDAGraphMode.NONE, num_tokens=batch.num_tokens)
        runner.state.prepare_inputs(batch, descriptor.num_tokens)
        # Without a graph, too, sequences grow beyond what the batch says: bounds are to hold for all steps.
        metadata = runner.state.prepare_attn(batch, descriptor, recorded_layers=frozenset(runner.layers))
        runner.buffers.input_ids.gpu[: batch.num_tokens].copy_(first)
        if descriptor.mode is not CUDAGraphMode.NONE:
            self.manager.replay(descriptor, batch.num_tokens, metadata)
        else:
            runner.report.uncaptured_runs += 1
            with torch.no_grad(), set_forward_context(runner.context(metadata, descriptor.num_tokens)):
                self.bound.run(descriptor.num_tokens)
        return self.guesses[: batch.num_reqs]

    def _run_one_by_one(self, works: Sequence[ScheduledRequest], first: torch.Tensor) -> torch.Tensor:
        tokens, columns = first, []
        for step in range(self.num_steps):
            ids = tokens.tolist()
            now = [
                dataclasses.replace(w, token_ids=[t], num_computed_tokens=w.num_computed_tokens + step)
                for w, t in zip(works, ids, strict=True)
            ]
            tokens = self.runner.execute(now).argmax(dim=-1)
            columns.append(tokens)
        return torch.stack(columns, dim=1)

    def _advance(self, step: int, hidden: torch.Tensor) -> None:
        """Take the likeliest token of each row as the next step's input. Padded and dummy rows stay inert."""
        buffers, count = self.runner.buffers, hidden.shape[0]
        tokens = self.runner.compute_logits(hidden).argmax(dim=-1)
        self.guesses[:count, step].copy_(tokens)
        if step == self.num_steps - 1:
            return
        slots, positions = buffers.slot_mapping.gpu[:count], buffers.positions.gpu[:count]
        seq_lens, table = buffers.seq_lens.gpu[:count], buffers.block_table.gpu[:count]
        is_real = slots >= 0
        buffers.input_ids.gpu[:count].copy_(tokens)
        positions.add_(is_real)
        seq_lens.add_(is_real)
        size = self.runner.config.block_size
        blocks = table.gather(1, (positions // size)[:, None])[:, 0].to(torch.int64)
        slots.copy_(torch.where(is_real, blocks * size + positions % size, slots))

    def _kind(self) -> BatchKind | None:
        """What is captured: decode of one token, if every group can be recorded in it."""
        runner = self.runner
        decode, config = runner.resolved.decode, runner.config
        everything = frozenset(runner.layers)
        if decode.mode is not CUDAGraphMode.FULL or decode.recorded_layers != everything:
            return None
        sizes = uniform_capture_sizes(
            runner.resolved.mixed.sizes or decode.sizes,
            query_len=1,
            max_num_reqs=config.max_num_reqs,
            max_num_tokens=config.max_num_tokens,
        )
        return BatchKind(
            uniform_query_len=1, mode=CUDAGraphMode.FULL, sizes=sizes, recorded_layers=decode.recorded_layers
        )
