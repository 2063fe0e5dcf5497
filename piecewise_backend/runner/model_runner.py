"""Requests in, logits out: one model, its caches, and its graphs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attention.forward_context import ForwardContext, set_forward_context
from attention.groups import init_attn_backend
from attention.kv_cache import allocate_kv_caches, block_bytes
from attention.layers import attention_layers
from piecewise_backend.backend import choose_recorder
from piecewise_backend.config import Options
from piecewise_backend.cudagraph.capture import CapturedProgram, Step
from piecewise_backend.cudagraph.manager import CudaGraphManager
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.cudagraph.resolve import BatchKind, resolve_cudagraph_mode_and_sizes
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.runner.batch import InputBatch, ScheduledRequest
from piecewise_backend.runner.block_tables import BlockTables
from piecewise_backend.runner.buffers import InputBuffers
from piecewise_backend.runner.model_state import ModelState
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

    def __post_init__(self) -> None:
        for name in ("max_num_tokens", "max_num_reqs", "max_model_len", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_reqs > self.max_num_tokens:
            raise ValueError(
                f"max_num_reqs ({self.max_num_reqs}) cannot exceed max_num_tokens ({self.max_num_tokens}): every "
                "running request needs a token in a step"
            )

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

    def __init__(self, model: nn.Module, config: RunnerConfig, options: Options, device: torch.device) -> None:
        self.model = model.eval().requires_grad_(False)
        self.config = config
        self.options = options
        self.device = device
        self.layers = attention_layers(model)
        dtype = next(model.parameters()).dtype
        self.specs = {n: m.get_spec(block_size=config.block_size, dtype=dtype) for n, m in self.layers.items()}
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
        caches = allocate_kv_caches(self.specs, self.num_blocks, self.device)
        for name, layer in self.layers.items():
            layer.bind(name, caches[name], self.buffers.slot_mapping.gpu)
        config = self.config
        self.groups, self.support, passed_over = init_attn_backend(
            self.specs,
            max_num_reqs=config.max_num_reqs,
            max_num_tokens=config.max_num_tokens,
            max_model_len=config.max_model_len,
            device=self.device,
            forced=config.attention_backend,
        )
        self.resolved = resolve_cudagraph_mode_and_sizes(
            CUDAGraphMode.parse(self.options.mode),
            self.groups,
            self.support,
            max_num_tokens=config.max_num_tokens,
            max_num_reqs=config.max_num_reqs,
            capture_sizes=self.options.capture_sizes,
        )
        self.state = ModelState(self.groups, self.buffers, self.block_tables, config.max_model_len)
        self.impls = {name: group.impl for group in self.groups for name in group.layer_names}
        self.bound = self._trace()
        self.report = self.bound.report
        self._report_start(passed_over)
        self.manager = CudaGraphManager(choose_recorder(self.options, self.device, self.report), self.report)
        if self.manager.recorder is None:
            self.report.mode_resolved = CUDAGraphMode.NONE.name
        self.manager.capture(self.resolved.descriptors(config.max_num_reqs), self.create_forward_fn)

    def execute(self, requests: Sequence[ScheduledRequest]) -> torch.Tensor:
        """One step. Returns logits [num_reqs, vocabulary], for the last new token of each request, in order.

        ValueError for an empty batch or one beyond the runner's limits.
        """
        batch = InputBatch.make(requests)
        self._check_limits(batch)
        descriptor = self.manager.dispatch(batch.num_tokens, batch.num_reqs, batch.uniform_query_len)
        if descriptor is None:
            descriptor = BatchDescriptor(mode=CUDAGraphMode.NONE, num_tokens=batch.num_tokens)
        self.state.prepare_inputs(batch, descriptor.num_tokens)
        metadata = self.state.prepare_attn(batch, descriptor)
        with torch.no_grad(), set_forward_context(self._context(metadata, descriptor.num_tokens)):
            (hidden,) = self._forward(descriptor, batch.num_tokens)
            last = torch.from_numpy(batch.query_start_loc[1:] - 1).to(self.device, non_blocking=True)
            rows = hidden[last.long()]
            head: Any = getattr(self.model, "compute_logits", None)
            return rows if head is None else head(rows)

    def _forward(self, descriptor: BatchDescriptor, num_tokens: int) -> tuple[Any, ...]:
        if descriptor.mode is not CUDAGraphMode.NONE:
            return self.manager.replay(descriptor, num_tokens)
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
        return self.bound.run(num_tokens)

    # Capturing: fresh inputs and metadata for every warm-up and every recording.

    def prepare_inputs_to_capture(
        self, descriptor: BatchDescriptor, *, full_cudagraph: bool, recorded_layers: frozenset[str]
    ) -> ForwardContext:
        """Dummy inputs for `descriptor`, and metadata for every group: always built, in every mode.

        `full_cudagraph`: a graph is about to be recorded that holds the operators of `recorded_layers`.
        """
        config = self.config
        batch = InputBatch.make_dummy(descriptor, max_num_reqs=config.max_num_reqs, max_model_len=config.max_model_len)
        self.state.prepare_inputs(batch, descriptor.num_tokens)
        metadata = self.state.prepare_attn(
            batch, descriptor, recorded_layers=recorded_layers, for_capture=full_cudagraph, is_dummy=True
        )
        return self._context(metadata, descriptor.num_tokens)

    def create_forward_fn(self, descriptor: BatchDescriptor, warmup: bool) -> Any:
        """A function that runs the model once for `descriptor`: plainly to warm up, else recording it."""
        kind = self._kind(descriptor)
        context = self.prepare_inputs_to_capture(
            descriptor, full_cudagraph=descriptor.mode is CUDAGraphMode.FULL, recorded_layers=kind.recorded_layers
        )
        args = self.bound.args_for(descriptor.num_tokens)

        def forward() -> CapturedProgram | None:
            with torch.no_grad(), set_forward_context(context):
                if warmup:
                    self.bound.program.run(args)
                    return None
                assert self.manager.recorder is not None
                return self.bound.program.capture(
                    args, recorder=self.manager.recorder, records=lambda step: _is_recorded(step, kind), execute=False
                )

        return forward

    def _kind(self, descriptor: BatchDescriptor) -> BatchKind:
        return self.resolved.mixed if descriptor.uniform_query_len is None else self.resolved.decode

    # Start-up's parts.

    def _trace(self) -> BoundProgram:
        num_tokens = max(2, self.config.max_num_tokens - 1)
        return trace(self.model, (self.buffers.input_ids.gpu, self.buffers.positions.gpu), num_tokens, self.options)

    def _report_start(self, passed_over: list[tuple[str, str]]) -> None:
        report = self.report
        report.name = type(self.model).__name__
        report.mode_resolved = self.resolved.mode.name
        report.capture_sizes = self.resolved.mixed.sizes or self.resolved.decode.sizes
        report.reasons.extend(self.resolved.reasons)
        for name, why in passed_over:
            report.reasons.add(Reason(ReasonCode.BACKEND_CHOSEN, f"attention backend {name!r}", f"passed over: {why}"))

    def _affordable_blocks(self) -> int:
        wanted = self.config.max_num_reqs * self.config.blocks_per_request
        each = block_bytes(self.specs)
        if not each:
            return wanted
        budget = _CPU_CACHE_BYTES
        if self.device.type == "cuda":
            budget = int(torch.cuda.mem_get_info(self.device)[0] * _GPU_CACHE_SHARE)
        return max(1, min(wanted, budget // each))

    def _context(self, metadata: dict[str, Any], num_tokens: int) -> ForwardContext:
        return ForwardContext(impls=self.impls, metadata=metadata, num_tokens=num_tokens)

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


def _is_recorded(step: Step, kind: BatchKind) -> bool:
    """Whether a breakpoint is recorded: our attention by its layer, anything else never (its rows are padded)."""
    assert step.breakpoint is not None
    return step.breakpoint.owns_metadata and step.breakpoint.capturable and step.layer in kind.recorded_layers
