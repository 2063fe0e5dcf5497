"""Requests in, logits out: one model, its caches, and its graphs."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from attention.forward_context import ForwardContext, set_forward_context
from attention.groups import AttentionCGSupportInfo, AttentionGroup, init_attn_backend, least_support
from attention.kv_cache import allocate_caches, state_bytes
from attention.layers import cached_layers
from piecewise_backend.backend import choose_recorder
from piecewise_backend.collector import collector_paused
from piecewise_backend.compiler_start import prepare_compiler
from piecewise_backend.config import Options
from piecewise_backend.cudagraph.capture import CapturedProgram, Step
from piecewise_backend.cudagraph.manager import CudaGraphManager
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.cudagraph.resolve import ResolvedCudagraphs, resolve_cudagraph_mode_and_sizes
from piecewise_backend.observe import tell
from piecewise_backend.program import followed
from piecewise_backend.reasons import Reason
from piecewise_backend.runner.batch import InputBatch, ScheduledRequest
from piecewise_backend.runner.block_tables import BlockTables
from piecewise_backend.runner.buffers import InputBuffers
from piecewise_backend.runner.cache_size import affordable_blocks
from piecewise_backend.runner.config import RunnerConfig
from piecewise_backend.runner.data_parallel import DataParallel, StepFacts
from piecewise_backend.runner.kernels_ahead import launches_ahead
from piecewise_backend.runner.model_state import GroupNotCapturable, ModelState
from piecewise_backend.runner.newest_tokens import WithNewestTokens
from piecewise_backend.runner.own_state import OwnState
from piecewise_backend.runner.products_ahead import ProductsAhead
from piecewise_backend.runner.results import check_result, checked_logits
from piecewise_backend.runner.speculation import Speculator
from piecewise_backend.runner.start_report import (
    lowered_reason,
    passed_over_reasons,
    report_start,
    support_left,
    uncaptured_reason,
)
from piecewise_backend.runner.trace import BoundProgram, trace
from piecewise_backend.structured_trace import trace_resolution

logger = logging.getLogger(__name__)

_MOST_LOGITS_ROWS = 128
"""Rows up to which decode graphs compute logits: of more, their launch is no share of a step, but they are the largest
tensor of a graph pool (128 MiB for 512 rows of 128256 in half precision)."""


class ModelRunner:
    """Runs a model made of `attention.layers` modules.

    model: `forward(input_ids [T] int64, positions [T] int64)` returns hidden states [T, H] and `compute_logits(hidden
    [R, H])` logits [R, V]; without `compute_logits`, forward's result are the logits. Only the layers look at other
    rows: besides them, each row of a result must come of the same row of the inputs, since rows of padding hold
    anything. Buffers that it writes to in place keep what it writes; `start` leaves them as they were. Weights may be
    changed in place; tensors put in their place after `start` are not seen. Call `start` once, then `execute` for each
    step.
    """

    groups: list[AttentionGroup]
    support: AttentionCGSupportInfo
    resolved: ResolvedCudagraphs
    state: ModelState
    bound: BoundProgram
    manager: CudaGraphManager

    def __init__(
        self,
        model: nn.Module,
        config: RunnerConfig,
        options: Options,
        device: torch.device,
        *,
        speculator: Speculator | None = None,
        data_parallel: DataParallel | None = None,
    ) -> None:
        """`speculator`: guesses tokens for an engine; it sets the config's `num_draft_tokens`. `data_parallel`: other
        ranks that run the same model in step with this one."""
        if speculator is not None:
            config = dataclasses.replace(config, num_draft_tokens=speculator.num_draft_tokens)
        self.model = model.eval().requires_grad_(False)
        self.speculator = speculator
        self.data_parallel = data_parallel
        self.config = config
        self.options = options
        self.device = device
        self.layers = cached_layers(model)
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
        self.specs = {
            name: layer.get_spec(block_size=config.block_size, dtype=dtype, num_draft_tokens=config.num_draft_tokens)
            for name, layer in self.layers.items()
        }
        self.has_states = state_bytes(self.specs) > 0
        self.buffers = InputBuffers(
            max_num_tokens=config.max_num_tokens,
            max_num_reqs=config.max_num_reqs,
            max_num_blocks=config.blocks_per_request,
            device=device,
        )
        self.num_blocks = config.num_blocks or affordable_blocks(self.specs, config, device)
        self.block_tables = BlockTables(self.buffers, config.block_size, self.num_blocks)

    @collector_paused()
    def start(self) -> None:
        """Everything before the first step, in the order in which each part needs the one before it."""
        prepare_compiler(self.options.compiler, self.device)
        ahead = ProductsAhead(self.model, self.config, self.options, self.device)
        ahead.begin()
        self._bind_caches()
        passed_over, refused = self._init_attn_backend(), list[Reason]()
        with OwnState(self.layers.values(), self.buffers) as own_state:
            while True:
                self.resolved = self._resolve()
                self.bound = own_state.keep(self._trace())
                self.report = self.bound.report
                before = (*refused, *passed_over)
                report_start(self.report, type(self.model).__name__, self.resolved, self.groups, before)
                self.manager = CudaGraphManager(choose_recorder(self.options, self.device, self.report), self.report)
                try:
                    descriptors = self.resolved.descriptors(self.config.max_num_reqs)
                    with ahead.noted():
                        self.manager.capture(descriptors, self.create_forward_fn, self.options.graph_memory_budget)
                    break
                except GroupNotCapturable as refusal:
                    refused.append(self._lower_support(refusal))
            if self.manager.recorder is None:
                self.report.mode_resolved = CUDAGraphMode.NONE.name
            if self.data_parallel is not None:
                self.manager.keep_only(self.data_parallel.agree_on_start(self.config, set(self.manager.captured)))
            if self.speculator is not None:
                self.speculator.start(self)  # resolves groups and modes of its own, for the blocks settled here
                self.report.speculation = self.speculator.report
        tell(lambda observer: observer.started(self.report))
        trace_resolution(self.report)

    def execute(self, requests: Sequence[ScheduledRequest]) -> torch.Tensor:
        """One step. Returns logits [R, vocabulary]: for each request in order, of its draft tokens and the token before
        them, so R = num_reqs where nothing is guessed.

        A token id of -1 stands for the request's newest token, which `keep_tokens` was told of. Logits are valid until
        the next step. ValueError for an empty batch or one beyond the runner's limits.
        """
        batch = InputBatch.make(requests)
        batch.check_limits(self.config, needs_state_slots=self.has_states)
        facts = StepFacts(batch.num_tokens, batch.num_reqs, batch.uniform_query_len)
        if self.data_parallel is not None:
            facts = self.data_parallel.agree(facts)
        return self._logits(batch, self.forward(batch, self._dispatch(facts)))

    def execute_idle(self) -> bool:
        """Take part in a step of other data-parallel ranks without requests of one's own: a dummy batch of the agreed
        size is run, and nothing is written to any cache. False, and nothing is run, where no rank had a request."""
        assert self.data_parallel is not None, "a step without requests makes sense with data parallelism only"
        facts = self.data_parallel.agree(StepFacts(0, 0, None))
        if not facts.num_tokens:
            return False
        descriptor = self._dispatch(facts)
        # Short sequences: the other ranks wait for this one.
        longest = -(-descriptor.num_tokens // (descriptor.num_reqs or min(descriptor.num_tokens, facts.num_reqs)))
        batch = InputBatch.make_dummy(
            descriptor, max_num_reqs=facts.num_reqs, max_model_len=min(longest, self.config.max_model_len)
        )
        self.forward(batch, descriptor)
        return True

    def _dispatch(self, facts: StepFacts) -> BatchDescriptor:
        """The captured variant for a step; a descriptor of mode NONE where there is none."""
        found = self.manager.dispatch(facts.num_tokens, facts.num_reqs, facts.uniform_query_len)
        return found or BatchDescriptor(mode=CUDAGraphMode.NONE, num_tokens=facts.num_tokens)

    def keep_tokens(self, requests: Sequence[ScheduledRequest], tokens: torch.Tensor) -> None:
        """Note the newest token of each request, [R] int64 on the device, for a step that is given -1 in its place."""
        slots = [r.state_slot for r in requests]
        assert min(slots) >= 0, "a token is kept by its request's state slot"
        index = torch.tensor(slots, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
        self.buffers.last_tokens.index_copy_(0, index, tokens)

    def forward(self, batch: InputBatch, descriptor: BatchDescriptor) -> tuple[torch.Tensor, ...]:
        """(hidden states [padded tokens, H],) of a batch, served by `descriptor`: valid until the next step. Where a
        graph holds the head too, logits [padded tokens, V] follow."""
        self.state.prepare_inputs(batch, descriptor.num_tokens)
        metadata = self.state.prepare_attn(batch, descriptor, recorded_layers=self._recorded_layers(descriptor))
        with torch.no_grad(), set_forward_context(self.context(metadata, descriptor.num_tokens)):
            if descriptor.mode is not CUDAGraphMode.NONE:
                return self.manager.replay(descriptor, batch.num_tokens, metadata)
            self._note_uncaptured(batch.num_tokens)
            return self.bound.run(descriptor.num_tokens)

    @torch.no_grad()
    def _logits(self, batch: InputBatch, outputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        count = len(batch.logits_rows)
        takes_all = count == batch.num_tokens  # uniform decode: they are the first rows, in order
        if len(outputs) > 1 and takes_all:
            return outputs[1][:count]
        hidden = outputs[0][:count] if takes_all else outputs[0][self.buffers.logits_rows.first(count)]
        return self.compute_logits(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> logits [R, V]. ValueError where the model's head gives anything else."""
        head: Any = getattr(self.model, "compute_logits", None)
        if head is None:
            return hidden
        return checked_logits(head(hidden), len(hidden), type(self.model).__name__)

    @property
    def num_logits(self) -> int:
        """Columns of the logits of a started runner's model."""
        (hidden,) = self.bound.program.output_fakes
        with torch.no_grad():
            return self.compute_logits(torch.zeros(1, hidden.shape[1], dtype=hidden.dtype, device=self.device)).shape[1]

    # Capturing: fresh inputs and metadata for every warm-up and every recording.

    def create_forward_fn(
        self, descriptor: BatchDescriptor, warmup: bool, bound: BoundProgram | None = None, headroom: int = 0
    ) -> Any:
        """A function that runs the model once for `descriptor`: plainly to warm up, else recording it.

        `bound`: another program on the same buffers, which adds up to `headroom` tokens to each sequence.
        """
        bound = bound or self._program_for(descriptor)
        recorded_layers = self._recorded_layers(descriptor)
        metadata = self.state.prepare_inputs_to_capture(
            descriptor,
            full_cudagraph=descriptor.mode is CUDAGraphMode.FULL,
            recorded_layers=recorded_layers,
            headroom=headroom,
        )
        context = self.context(metadata, descriptor.num_tokens)
        args = bound.args_for(descriptor.num_tokens)

        def forward() -> CapturedProgram | None:
            with torch.no_grad(), set_forward_context(context):
                if warmup:
                    bound.program.warm_up(args, self._kernels_of)
                    return None
                assert self.manager.recorder is not None
                captured = bound.program.capture(
                    args,
                    recorder=self.manager.recorder,
                    records=lambda step: step.is_recorded(recorded_layers),
                    execute=False,
                )
            return dataclasses.replace(captured, fingerprints=self.state.fingerprints(metadata, recorded_layers))

        return forward

    def _kernels_of(self, step: Step) -> object:
        """Equal for operators that launch the same kernels; None for one of which nothing is known."""
        return self.impls.get(step.layer) if step.layer is not None else None

    # Start-up's parts.

    def _bind_caches(self) -> None:
        slots = self.config.max_num_reqs
        caches = allocate_caches(self.specs, num_blocks=self.num_blocks, num_slots=slots, device=self.device)
        for name, layer in self.layers.items():
            layer.bind(name, self.buffers.for_layers() | caches[name])

    def _init_attn_backend(self) -> list[Reason]:
        """Groups, support and builders; returns what was passed over on the way."""
        config = self.config
        self.groups, self.support, passed_over = init_attn_backend(
            self.specs,
            max_num_reqs=config.max_num_reqs,
            max_num_tokens=config.max_num_tokens,
            max_model_len=config.max_model_len,
            device=self.device,
            forced=config.attention_backend,
        )
        self.state = ModelState(
            self.groups,
            self.buffers,
            self.block_tables,
            max_num_reqs=config.max_num_reqs,
            max_model_len=config.max_model_len,
        )
        self.impls = {name: group.impl for group in self.groups for name in group.layer_names}
        return passed_over_reasons(passed_over)

    def _resolve(self) -> ResolvedCudagraphs:
        config, options = self.config, self.options
        return resolve_cudagraph_mode_and_sizes(
            CUDAGraphMode.parse(options.mode),
            self.groups,
            self.support,
            max_num_tokens=config.max_num_tokens,
            max_num_reqs=config.max_num_reqs,
            decode_query_len=config.decode_query_len,
            capture_sizes=options.capture_sizes,
            decode_capture_sizes=options.decode_capture_sizes,
            strict_minimum=options.strict_minimum,
        )

    def _program_for(self, descriptor: BatchDescriptor) -> BoundProgram:
        """What a variant is recorded of. In uniform decode logits are wanted for every row, so they are part of it."""
        is_decode = descriptor.mode is CUDAGraphMode.FULL and descriptor.uniform_query_len is not None
        if not is_decode or descriptor.num_tokens > _MOST_LOGITS_ROWS:
            return self.bound
        return dataclasses.replace(self.bound, program=followed(self.bound.program, self.compute_logits, "logits"))

    def _trace(self) -> BoundProgram:
        options = dataclasses.replace(
            self.options,
            splitting_ops=(*self.options.splitting_ops, *self.resolved.splitting_ops),
        )
        num_tokens = max(2, self.config.max_num_tokens - 1)
        model = WithNewestTokens(self.model, self.buffers)
        buffers = (self.buffers.input_ids.gpu, self.buffers.positions.gpu)
        launches_of = functools.partial(launches_ahead, self.groups, self.state)
        bound = trace(model, buffers, num_tokens, options, launches_of)
        check_result(bound, type(self.model).__name__)
        return bound

    def _lower_support(self, refusal: GroupNotCapturable) -> Reason:
        """Believe a builder that refuses, whatever it declared; returns the reason for the report."""
        gives = support_left(refusal)
        self.groups = [dataclasses.replace(g, support=gives) if g is refusal.group else g for g in self.groups]
        self.support = least_support(self.groups)
        self.state.groups = tuple(self.groups)
        logger.warning("%s", refusal)
        return lowered_reason(refusal)

    # Each step's parts.

    def _recorded_layers(self, descriptor: BatchDescriptor) -> frozenset[str]:
        if descriptor.mode is CUDAGraphMode.NONE:
            return frozenset()
        return self.resolved.kind_of(descriptor).recorded_layers

    def context(self, metadata: dict[str, Any], num_tokens: int) -> ForwardContext:
        across = None if self.data_parallel is None else (num_tokens,) * self.data_parallel.world_size
        return ForwardContext(impls=self.impls, metadata=metadata, num_tokens=num_tokens, num_tokens_across_dp=across)

    def _note_uncaptured(self, num_tokens: int) -> None:
        self.report.uncaptured_runs += 1
        if self.manager.captured:
            self.report.reasons.add(uncaptured_reason(num_tokens))
