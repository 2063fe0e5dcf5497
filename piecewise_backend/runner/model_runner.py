"""Requests in, logits out: one model, its caches, and its graphs."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attention.base import AttentionCGSupport
from attention.forward_context import ForwardContext, set_forward_context
from attention.groups import AttentionCGSupportInfo, AttentionGroup, init_attn_backend, least_support
from attention.kv_cache import allocate_caches, block_bytes, state_bytes
from attention.layers import cached_layers
from piecewise_backend.backend import choose_recorder
from piecewise_backend.config import Options
from piecewise_backend.cudagraph.capture import CapturedProgram, Step
from piecewise_backend.cudagraph.manager import CudaGraphManager
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.cudagraph.resolve import BatchKind, ResolvedCudagraphs, resolve_cudagraph_mode_and_sizes
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.report import GroupReport
from piecewise_backend.runner.batch import InputBatch, ScheduledRequest
from piecewise_backend.runner.block_tables import BlockTables
from piecewise_backend.runner.buffers import InputBuffers
from piecewise_backend.runner.model_state import GroupNotCapturable, ModelState
from piecewise_backend.runner.speculation import Speculator
from piecewise_backend.runner.trace import BoundProgram, trace

logger = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 2 << 30
_GPU_CACHE_SHARE = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Limits of one runner."""

    max_num_tokens: int = 512
    """Tokens of one step, over all requests."""
    max_num_reqs: int = 64
    max_model_len: int = 2048
    """Tokens of one request, prompt and output."""
    block_size: int = 16
    num_blocks: int | None = None
    """Blocks of the paged cache; None: as many as `max_num_reqs` full requests need, or as memory allows."""
    attention_backend: str | None = None
    """Force one; None chooses."""
    num_draft_tokens: int = 0
    """Tokens of a step that may be rejected afterwards: guesses that a decode step verifies besides its one token."""
    uniform_query_len: int | None = None
    """Tokens of each request in a decode step; None: 1 + num_draft_tokens."""

    def __post_init__(self) -> None:
        for name in ("max_num_tokens", "max_num_reqs", "max_model_len", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must be 0 (no speculation) or more, got {self.num_draft_tokens}")
        if self.max_num_reqs > self.max_num_tokens:
            raise ValueError(
                f"max_num_reqs ({self.max_num_reqs}) cannot exceed max_num_tokens ({self.max_num_tokens}): every "
                "running request needs a token in a step"
            )

    @property
    def decode_query_len(self) -> int:
        """Tokens of one request in a decode step."""
        return self.uniform_query_len or 1 + self.num_draft_tokens

    @property
    def blocks_per_request(self) -> int:
        """Blocks of a request of maximal length."""
        return -(-self.max_model_len // self.block_size)


class ModelRunner:
    """Runs a model made of `attention.layers` modules.

    model: `forward(input_ids [T] int64, positions [T] int64)` returns hidden states [T, H] and `compute_logits(hidden
    [R, H])` logits [R, V]; without `compute_logits`, forward's result are the logits. Call `start` once, then
    `execute` for each step.
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
    ) -> None:
        """`speculator`: guesses tokens for an engine; it sets the config's `num_draft_tokens`."""
        if speculator is not None:
            config = dataclasses.replace(config, num_draft_tokens=speculator.num_draft_tokens)
        self.model = model.eval().requires_grad_(False)
        self.speculator = speculator
        self.config = config
        self.options = options
        self.device = device
        self.layers = cached_layers(model)
        dtype = next(model.parameters()).dtype
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
        self.block_tables = BlockTables(self.buffers, config.block_size)
        self.num_blocks = config.num_blocks or self._affordable_blocks()

    def start(self) -> None:
        """Everything before the first step, in the order in which each part needs the one before it."""
        self._bind_caches()
        passed_over = self._init_attn_backend()
        refused: list[Reason] = []
        while True:
            self.resolved = self._resolve()
            self.bound = self._trace()
            self.report = self.bound.report
            self._report_start(passed_over, refused)
            self.manager = CudaGraphManager(choose_recorder(self.options, self.device, self.report), self.report)
            try:
                self.manager.capture(self.resolved.descriptors(self.config.max_num_reqs), self.create_forward_fn)
                break
            except GroupNotCapturable as refusal:
                refused.append(self._lower_support(refusal))
        if self.manager.recorder is None:
            self.report.mode_resolved = CUDAGraphMode.NONE.name
        if self.speculator is not None:
            self.speculator.start(self)  # resolves groups and modes of its own, for the blocks settled here
            self.report.speculation = self.speculator.report

    def execute(self, requests: Sequence[ScheduledRequest]) -> torch.Tensor:
        """One step. Returns logits [R, vocabulary]: for each request in order, of its draft tokens and the token before
        them, so R = num_reqs where nothing is guessed.

        ValueError for an empty batch or one beyond the runner's limits.
        """
        batch = InputBatch.make(requests)
        self._check_limits(batch)
        descriptor = self.manager.dispatch(batch.num_tokens, batch.num_reqs, batch.uniform_query_len)
        if descriptor is None:
            descriptor = BatchDescriptor(mode=CUDAGraphMode.NONE, num_tokens=batch.num_tokens)
        hidden = self.forward(batch, descriptor)
        with torch.no_grad():
            rows = torch.from_numpy(batch.logits_rows).to(self.device, non_blocking=True)
            return self.compute_logits(hidden[rows])

    def forward(self, batch: InputBatch, descriptor: BatchDescriptor) -> torch.Tensor:
        """Hidden states [padded tokens, H] of a batch, served by `descriptor`: valid until the next step."""
        self.state.prepare_inputs(batch, descriptor.num_tokens)
        metadata = self.state.prepare_attn(batch, descriptor, recorded_layers=self._recorded_layers(descriptor))
        with torch.no_grad(), set_forward_context(self.context(metadata, descriptor.num_tokens)):
            if descriptor.mode is not CUDAGraphMode.NONE:
                return self.manager.replay(descriptor, batch.num_tokens, metadata)[0]
            self._note_uncaptured(batch.num_tokens)
            return self.bound.run(descriptor.num_tokens)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, H] -> logits [R, V]."""
        head: Any = getattr(self.model, "compute_logits", None)
        return hidden if head is None else head(hidden)

    # Capturing: fresh inputs and metadata for every warm-up and every recording.

    def create_forward_fn(
        self, descriptor: BatchDescriptor, warmup: bool, bound: BoundProgram | None = None, headroom: int = 0
    ) -> Any:
        """A function that runs the model once for `descriptor`: plainly to warm up, else recording it.

        `bound`: another program on the same buffers, which adds up to `headroom` tokens to each sequence.
        """
        bound = bound or self.bound
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
                    bound.program.run(args)
                    return None
                assert self.manager.recorder is not None
                captured = bound.program.capture(
                    args,
                    recorder=self.manager.recorder,
                    records=lambda step: is_recorded(step, recorded_layers),
                    execute=False,
                )
            return dataclasses.replace(captured, fingerprints=self.state.fingerprints(metadata, recorded_layers))

        return forward

    # Start-up's parts.

    def _bind_caches(self) -> None:
        config = self.config
        caches = allocate_caches(
            self.specs, num_blocks=self.num_blocks, num_slots=config.max_num_reqs, device=self.device
        )
        for name, layer in self.layers.items():
            layer.bind(name, self.buffers.for_layers() | caches[name])

    def _init_attn_backend(self) -> list[tuple[str, str]]:
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
        return passed_over

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

    def _trace(self) -> BoundProgram:
        num_tokens = max(2, self.config.max_num_tokens - 1)
        splitting_ops = (*self.options.splitting_ops, *self.resolved.splitting_ops)
        options = dataclasses.replace(self.options, splitting_ops=splitting_ops)
        return trace(self.model, (self.buffers.input_ids.gpu, self.buffers.positions.gpu), num_tokens, options)

    def _lower_support(self, refusal: GroupNotCapturable) -> Reason:
        """Believe a builder that refuses, whatever it declared; returns the reason for the report."""
        query_len = refusal.descriptor.uniform_query_len
        gives = AttentionCGSupport.UNIFORM_BATCH
        if query_len is not None:
            single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
            gives = single if query_len > 1 else AttentionCGSupport.NEVER
        refused = refusal.group
        self.groups = [dataclasses.replace(g, support=gives) if g is refused else g for g in self.groups]
        self.support = least_support(self.groups)
        self.state.groups = tuple(self.groups)
        logger.warning("%s", refusal)
        return Reason(
            ReasonCode.SUPPORT_LOWERED,
            f"{refused}",
            f"declares {refused.support.name}, taken as {gives.name}: {refusal.__cause__}",
            f"declare it in {type(refused.builder).__name__}.cudagraph_support",
        )

    def _report_start(self, passed_over: list[tuple[str, str]], refused: list[Reason]) -> None:
        report = self.report
        report.name = type(self.model).__name__
        report.mode_resolved = self.resolved.mode.name
        report.capture_sizes = self.resolved.mixed.sizes or self.resolved.decode.sizes
        report.groups = [self._group_report(group) for group in self.groups]
        report.reasons.extend((*refused, *self.resolved.reasons))
        for name, why in passed_over:
            report.reasons.add(Reason(ReasonCode.BACKEND_CHOSEN, f"attention backend {name!r}", f"passed over: {why}"))

    def _group_report(self, group: AttentionGroup) -> GroupReport:
        def fate(kind: BatchKind) -> str:
            if kind.mode is CUDAGraphMode.NONE:
                return "no graphs"
            return "recorded" if kind.recorded_layers.issuperset(group.layer_names) else "breaks"

        return GroupReport(
            backend=group.backend.name,
            num_layers=len(group.layer_names),
            support=group.support.name,
            in_piece=group.in_piece and group.spec.operator not in self.resolved.splitting_ops,
            decode=fate(self.resolved.decode),
            mixed=fate(self.resolved.mixed),
        )

    def _affordable_blocks(self) -> int:
        wanted = self.config.max_num_reqs * self.config.blocks_per_request
        each = block_bytes(self.specs)
        if not each:
            return wanted
        budget = _CPU_CACHE_BYTES
        if self.device.type == "cuda":
            budget = int(torch.cuda.mem_get_info(self.device)[0] * _GPU_CACHE_SHARE)
        budget -= self.config.max_num_reqs * state_bytes(self.specs)
        return max(1, min(wanted, budget // each))

    # Each step's parts.

    def _recorded_layers(self, descriptor: BatchDescriptor) -> frozenset[str]:
        if descriptor.mode is CUDAGraphMode.NONE:
            return frozenset()
        return self.resolved.kind_of(descriptor).recorded_layers

    def context(self, metadata: dict[str, Any], num_tokens: int) -> ForwardContext:
        return ForwardContext(impls=self.impls, metadata=metadata, num_tokens=num_tokens)

    def _note_uncaptured(self, num_tokens: int) -> None:
        self.report.uncaptured_runs += 1
        if self.manager.captured:
            self.report.reasons.add(
                Reason(
                    ReasonCode.ABOVE_ALL_SIZES,
                    f"{num_tokens} tokens",
                    "no captured size holds this batch",
                    "add a size to options={'capture_sizes': [...]}",
                )
            )

    def _check_limits(self, batch: InputBatch) -> None:
        config = self.config
        for what, got, allowed in (
            ("tokens", batch.num_tokens, config.max_num_tokens),
            ("requests", batch.num_reqs, config.max_num_reqs),
            ("tokens in one sequence", batch.max_seq_len, config.max_model_len),
        ):
            if got > allowed:
                raise ValueError(
                    f"a step of {got} {what} is beyond this runner's {allowed}; split it, or raise the limit"
                )
        slots = [r.state_slot for r in batch.requests]
        if self.has_states and (min(slots) < 0 or max(slots) >= config.max_num_reqs or len(set(slots)) < len(slots)):
            raise ValueError(
                f"this model keeps states per request, so each needs a state_slot of its own from 0 to "
                f"{config.max_num_reqs - 1}, the same in all its steps; got {slots}"
            )


def is_recorded(step: Step, recorded_layers: frozenset[str]) -> bool:
    """Whether a breakpoint is recorded: our layers' by their names, anything else never (its rows are padded)."""
    assert step.breakpoint is not None
    return step.breakpoint.owns_metadata and step.breakpoint.capturable and step.layer in recorded_layers
