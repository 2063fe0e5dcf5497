"""What the Triton backend supports, the launch it plans for a batch, and the launch itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from attention.backends.triton.kernels import attention_kernel, reduce_kernel
from attention.backends.triton.tiles import MAX_GROUP, Tile, all_tiles, choose_tile, padded_head_size
from attention.base import AttentionBackend, AttentionCGSupport, AttentionImpl, MetadataBuilder
from attention.metadata import CommonAttentionMetadata
from attention.specs import AttentionSpec

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter. Settled when they are decorated, so read once, here."""

_MAX_HEAD_SIZE = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SPLITS_PER_STEP = 16
"""Partial results that the reduction holds at a time."""
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything about the launches that is not a tensor. A function of padded sizes and maxima alone."""

    tile: Tile
    block_q: int
    """Query tokens a program."""
    one_block: bool
    """No request has more than `block_q` query tokens, so query block i is request i."""
    num_query_blocks: int
    """An upper bound: programs that find no tokens leave."""
    tokens_per_block: int
    """Query tokens that a block can really have."""
    num_splits: int
    """Programs that share the keys of one query block and KV head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonMetadata:
    """Views of the runner's buffers (see `CommonAttentionMetadata`), and of the builder's workspace."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    partial_out: torch.Tensor
    """[workspace rows, head_size] fp32: a row for each token, head and split."""
    partial_lse: torch.Tensor
    """[workspace rows] fp32."""
    plan: LaunchPlan


class TritonMetadataBuilder(MetadataBuilder[TritonMetadata]):
    """Plans launches; owns the workspace in which splits of the KV axis leave their results."""

    # Programs find their work on the device, whatever the mix of requests.
    cudagraph_support = AttentionCGSupport.ALWAYS
    advances_on_device = True

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        super().__init__(
            spec,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_model_len=max_model_len,
            device=device,
        )
        self.num_sms, self.shared_memory = _device_limits(device)
        rows = self._max_workspace_rows()
        self.partial_out = torch.empty(rows, spec.head_size, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(rows, dtype=torch.float32, device=device)

    def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> TritonMetadata:
        """Metadata of one batch; a launch recorded over it is right for every batch of these padded sizes."""
        plan = self.plan(
            num_tokens=common.num_tokens,
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=self.max_model_len if for_capture else common.max_seq_len,
        )
        return TritonMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            partial_out=self.partial_out,
            partial_lse=self.partial_lse,
            plan=plan,
        )

    def plan(self, *, num_tokens: int, num_reqs: int, max_query_len: int, max_seq_len: int) -> LaunchPlan:
        """The launch for padded sizes and upper bounds; see `LaunchPlan`."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        max_query_len = min(max_query_len, num_tokens)
        tile = choose_tile(
            rows=max_query_len * group,
            group=group,
            head_size=self.spec.head_size,
            itemsize=self.spec.dtype.itemsize,
            shared_memory=self.shared_memory,
        )
        block_q = tile.block_m // group
        one_block = max_query_len <= block_q
        # Rounding up costs each request at most one block.
        num_query_blocks = num_reqs if one_block else num_tokens // block_q + num_reqs
        programs = max(1, num_query_blocks * self.spec.num_kv_heads)
        num_splits = min(tile.programs_per_sm * self.num_sms // programs, _max_splits(tile, max_seq_len))
        return LaunchPlan(
            tile=tile,
            block_q=block_q,
            one_block=one_block,
            num_query_blocks=num_query_blocks,
            tokens_per_block=min(block_q, max_query_len),
            num_splits=max(1, num_splits),
        )

    def _max_workspace_rows(self) -> int:
        """The most rows (token, head, split) of any plan with more than one split.

        `num_splits * num_query_blocks * num_kv_heads` is at most `programs_per_sm * num_sms`, and a query
        block has at most `block_m` rows a KV head.
        """
        spec = self.spec
        most = 1
        for tile in all_tiles(
            group=spec.num_heads // spec.num_kv_heads,
            head_size=spec.head_size,
            itemsize=spec.dtype.itemsize,
            shared_memory=self.shared_memory,
        ):
            by_programs = tile.programs_per_sm * self.num_sms * tile.block_m
            by_length = self.max_num_tokens * spec.num_heads * _max_splits(tile, self.max_model_len)
            most = max(most, min(by_programs, by_length))
        return most


class TritonAttentionImpl(AttentionImpl[TritonMetadata]):
    """One launch for any batch, and one more where the keys are split."""

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: TritonMetadata, out: torch.Tensor) -> None:
        """See `AttentionImpl.forward`. Any strides, with the last dimension contiguous."""
        if query.stride(2) != 1 or kv_cache.stride(4) != 1 or out.stride(2) != 1:
            raise ValueError(
                "triton attention needs contiguous head dimensions (call .contiguous()), got strides "
                f"query {query.stride()}, kv_cache {kv_cache.stride()}, out {out.stride()}"
            )
        plan = metadata.plan
        if plan.num_query_blocks == 0:
            return
        spec, tile = self.spec, plan.tile
        if spec.soft_cap is None:
            qk_scale, soft_cap_log2 = spec.scale * _LOG2_E, 0.0
        else:
            qk_scale, soft_cap_log2 = spec.scale / spec.soft_cap, spec.soft_cap * _LOG2_E
        window = spec.sliding_window or 0
        split = plan.num_splits > 1
        attention_kernel[(plan.num_query_blocks, spec.num_kv_heads, plan.num_splits)](
            query,
            kv_cache,
            out,
            metadata.partial_out,
            metadata.partial_lse,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.seq_lens.shape[0],
            plan.num_splits,
            qk_scale,
            soft_cap_log2,
            query.stride(0),
            query.stride(1),
            out.stride(0),
            out.stride(1),
            kv_cache.stride(0),
            kv_cache.stride(1),
            kv_cache.stride(2),
            kv_cache.stride(3),
            metadata.block_table.stride(0),
            NUM_HEADS=spec.num_heads,
            GROUP=spec.num_heads // spec.num_kv_heads,
            HEAD_SIZE=spec.head_size,
            BLOCK_D=padded_head_size(spec.head_size),
            BLOCK_SIZE=spec.block_size,
            BLOCK_Q=plan.block_q,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            WINDOW=window,
            SOFT_CAP=spec.soft_cap is not None,
            SPLIT=split,
            ONE_BLOCK=plan.one_block,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if split:
            reduce_kernel[(plan.num_query_blocks * plan.tokens_per_block, spec.num_heads)](
                metadata.partial_out,
                metadata.partial_lse,
                out,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.seq_lens.shape[0],
                plan.num_splits,
                plan.tokens_per_block,
                out.stride(0),
                out.stride(1),
                NUM_HEADS=spec.num_heads,
                HEAD_SIZE=spec.head_size,
                BLOCK_D=padded_head_size(spec.head_size),
                BLOCK_Q=plan.block_q,
                BLOCK_N=tile.block_n,
                WINDOW=window,
                ONE_BLOCK=plan.one_block,
                CHUNK=_SPLITS_PER_STEP,
                num_warps=4,
            )


class TritonBackend(AttentionBackend):
    """Paged attention for CUDA GPUs, and for the CPU in Triton's interpreter."""

    name = "triton"

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """See `AttentionBackend.unsupported_reason`."""
        if device.type not in ("cuda", "cpu"):
            return f"its kernels run on CUDA devices, not on {device.type!r}"
        if device.type == "cpu" and not INTERPRETED:
            return (
                "its kernels need a CUDA device; on the CPU they run only in Triton's interpreter, for tests "
                "(TRITON_INTERPRET=1 in the environment before triton is imported)"
            )
        if device.type == "cuda" and INTERPRETED:
            # It would copy every tensor to the host and back, and cannot be recorded.
            return "Triton's interpreter is on (TRITON_INTERPRET=1), which is for the CPU"
        if spec.dtype not in _DTYPES:
            return f"dtype {spec.dtype} is not one of {[str(dtype) for dtype in _DTYPES]}"
        if INTERPRETED and spec.dtype == torch.bfloat16:
            return "Triton's interpreter multiplies bfloat16 wrongly; use float16 or float32 on the CPU"
        if spec.block_size < 16 or spec.block_size & (spec.block_size - 1):
            return f"block_size must be a power of two of at least 16, got {spec.block_size}"
        if spec.head_size > _MAX_HEAD_SIZE:
            return f"head_size must be at most {_MAX_HEAD_SIZE}, got {spec.head_size}"
        if (group := spec.num_heads // spec.num_kv_heads) > MAX_GROUP:
            return f"at most {MAX_GROUP} query heads may share a KV head, got {group}"
        return None

    @staticmethod
    def get_builder_cls() -> type[TritonMetadataBuilder]:
        """The builder's class."""
        return TritonMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        """The computation's class."""
        return TritonAttentionImpl


def _device_limits(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory a program may have)."""
    if device.type != "cuda":
        # The interpreter has neither; a few, so that small batches are split as they are on a GPU.
        return 16, 1 << 30
    properties = torch.cuda.get_device_properties(device)
    # ROCm has no opt-in size, and torch's stubs do not know of it.
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return properties.multi_processor_count, shared


def _max_splits(tile: Tile, max_seq_len: int) -> int:
    """A split has at least one tile of keys."""
    return triton.cdiv(max_seq_len, tile.block_n)
