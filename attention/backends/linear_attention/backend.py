"""What the backend supports, the chunks it plans for long requests, and the choice between its computations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch

from attention.backends.devices import unsupported_device
from attention.backends.limits import BuilderLimits
from attention.backends.linear_attention.reference import gated_delta_rule
from attention.backends.linear_attention.step import Step
from attention.base import AttentionBackend, AttentionCGSupport, MetadataBuilder, UncapturableMetadata
from attention.metadata import CommonAttentionMetadata
from attention.specs import LinearAttentionSpec

CHUNK_SIZE = 64
"""Tokens of a chunk at most: what the tensor cores take as rows, and as fp32 fits into shared memory."""

_MAX_HEAD_SIZE = 128
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NUM_STAGING_BUFFERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionMetadata:
    """Views of the runner's buffers (see `CommonAttentionMetadata`), and the builder's plan for long requests.

    A request is long when it has more query tokens than the layer keeps states. Where none can be, both numbers are
    0 and the plan is not read.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    state_slots: torch.Tensor
    chunk_plan: torch.Tensor
    """[maximum, 2] int32, device: first token of a chunk, and the end of its tokens."""
    request_plan: torch.Tensor
    """[max_num_reqs, 2] int32, device: a long request, and the first of its consecutive chunks."""
    num_chunks: int
    """Rows of `chunk_plan` that hold."""
    num_long_reqs: int
    """Rows of `request_plan` that hold."""


class LinearAttentionMetadataBuilder(MetadataBuilder[LinearAttentionMetadata]):
    """Hands the runner's buffers on; cuts long requests into chunks, on the host."""

    # The kernel for decode and for draft tokens finds its work on the device; chunks are counted on the host.
    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    advances_on_device = True

    def __init__(self, spec: LinearAttentionSpec, **limits: Unpack[BuilderLimits]) -> None:
        super().__init__(spec, **limits)
        # Rounding up costs each request at most one chunk.
        self.max_num_chunks = self.max_num_tokens // CHUNK_SIZE + self.max_num_reqs
        self.plan = torch.zeros(self.max_num_chunks + self.max_num_reqs, 2, dtype=torch.int32, device=self.device)
        self.staging = _Staging(self.plan)

    def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> LinearAttentionMetadata:
        """Metadata of one batch; see `MetadataBuilder.build`."""
        num_chunks = num_long_reqs = 0
        if common.max_query_len > self.spec.num_states:
            if for_capture:
                raise UncapturableMetadata(
                    f"linear attention keeps {self.spec.num_states} states a request, and this batch has requests of "
                    f"up to {common.max_query_len} query tokens: they run in chunks, whose plan and number depend on "
                    "query lengths that only the host knows. Record batches of at most "
                    f"{self.spec.num_states} tokens a request, and run others without a graph"
                )
            num_chunks, num_long_reqs = self._plan_chunks(common.query_start_loc_cpu.numpy())
        return LinearAttentionMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            state_slots=common.state_slots,
            chunk_plan=self.plan[: self.max_num_chunks],
            request_plan=self.plan[self.max_num_chunks :],
            num_chunks=num_chunks,
            num_long_reqs=num_long_reqs,
        )

    def _plan_chunks(self, query_start_loc: np.ndarray) -> tuple[int, int]:
        """Fill the plan; the number of chunks and of long requests."""
        starts, ends = query_start_loc[:-1], query_start_loc[1:]
        requests = np.flatnonzero(ends - starts > self.spec.num_states)
        starts, ends = starts[requests], ends[requests]
        counts = -(-(ends - starts) // CHUNK_SIZE)
        first_chunks = np.cumsum(counts) - counts
        num_chunks = int(counts.sum())
        index = np.arange(num_chunks) - np.repeat(first_chunks, counts)
        first_tokens = np.repeat(starts, counts) + index * CHUNK_SIZE
        with self.staging as host:
            host[:num_chunks, 0] = first_tokens
            host[:num_chunks, 1] = np.minimum(first_tokens + CHUNK_SIZE, np.repeat(ends, counts))
            host[self.max_num_chunks : self.max_num_chunks + len(requests)] = np.stack([requests, first_chunks], 1)
        return num_chunks, len(requests)


class _Staging:
    """A ring of host buffers for one device buffer: `with staging as host` fills one, then starts its copy.

    The copy of an earlier step may still read its host buffer, so on CUDA buffers are pinned and have an event
    each, which is waited for before the buffer is written again.
    """

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target
        cuda = target.device.type == "cuda"
        ring = range(_NUM_STAGING_BUFFERS if cuda else 1)
        self.hosts = [torch.zeros(target.shape, dtype=target.dtype, pin_memory=cuda) for _ in ring]
        self.events = [torch.cuda.Event() if cuda else None for _ in ring]
        self.index = 0

    def __enter__(self) -> np.ndarray:
        self.index = (self.index + 1) % len(self.hosts)
        if (event := self.events[self.index]) is not None:
            event.synchronize()  # returns at once if never recorded
        return self.hosts[self.index].numpy()

    def __exit__(self, *_: object) -> None:
        self.target.copy_(self.hosts[self.index], non_blocking=True)
        if (event := self.events[self.index]) is not None:
            event.record(torch.cuda.current_stream(self.target.device))


class LinearAttentionImpl:
    """Token by token on the CPU. On CUDA, a kernel for short requests and, where there are any, two for long ones."""

    def __init__(self, spec: LinearAttentionSpec) -> None:
        self.spec = spec

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        recurrent_state: torch.Tensor,
        metadata: LinearAttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        """One step of every request: its new tokens' results to `out`, its state updated in place.

        query, key: [num_tokens, Hk, Dk]; value, out: [num_tokens, Hv, Dv]; log_decay, beta: [num_tokens, Hv], all of
        fp32, fp16 or bf16. recurrent_state: [num_slots, N, Hv, Dk, Dv] fp32. On CUDA last dimensions are contiguous,
        log_decay's and beta's excepted; other strides are free. Rows of `out` past the true tokens are left as they
        are.
        """
        step = Step(
            query=query,
            key=key,
            value=value,
            log_decay=log_decay,
            beta=beta,
            recurrent_state=recurrent_state,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            state_slots=metadata.state_slots,
            out=out,
            scale=self.spec.scale,
        )
        if query.device.type == "cpu":
            gated_delta_rule(step)
        else:
            self._run_kernels(step, metadata)

    def _run_kernels(self, step: Step, metadata: LinearAttentionMetadata) -> None:
        from attention.backends.linear_attention import launch  # Triton, which a machine without a GPU may lack

        launch.step_short_requests(step)
        if metadata.num_chunks:
            chunk_plan = metadata.chunk_plan[: metadata.num_chunks]
            request_plan = metadata.request_plan[: metadata.num_long_reqs]
            launch.step_long_requests(step, chunk_plan, request_plan, chunk_size=CHUNK_SIZE)


class LinearAttentionBackend(AttentionBackend):
    """The gated delta rule for CUDA GPUs, and slowly for the CPU."""

    name = "linear_attention"

    @classmethod
    def unsupported_reason(cls, spec: LinearAttentionSpec, device: torch.device) -> str | None:
        """See `AttentionBackend.unsupported_reason`."""
        reason = unsupported_device(device)
        if reason is None and device.type == "cuda":
            if spec.dtype not in _DTYPES:
                return f"dtype {spec.dtype} is not one of {[str(dtype) for dtype in _DTYPES]}"
            if max(spec.head_k_size, spec.head_v_size) > _MAX_HEAD_SIZE:
                return (
                    f"head sizes must be at most {_MAX_HEAD_SIZE} on CUDA, got head_k_size {spec.head_k_size} and "
                    f"head_v_size {spec.head_v_size}"
                )
        return reason

    @staticmethod
    def get_builder_cls() -> type[LinearAttentionMetadataBuilder]:
        """The builder's class."""
        return LinearAttentionMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[LinearAttentionImpl]:
        """The computation's class."""
        return LinearAttentionImpl
