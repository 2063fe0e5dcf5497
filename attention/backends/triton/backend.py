"""What the Triton backend supports, the launch it plans for a batch, and the launch itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from attention.backends.triton.bound import BoundLaunches, Launch
from attention.backends.triton.kernels import attention_kernel, merge_kernel
from attention.backends.triton.tiles import (
    MAX_GROUP,
    Tile,
    all_tiles,
    choose_tile,
    next_power_of_2,
    padded_head_size,
)
from attention.base import AttentionBackend, AttentionCGSupport, AttentionImpl, MetadataBuilder
from attention.metadata import CommonAttentionMetadata
from attention.specs import AttentionSpec

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter. Settled when they are decorated, so read once, here."""

_MAX_HEAD_SIZE = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MOST_ROWS_TO_MERGE = 32
"""Rows of a tile that one program may have to merge over all splits."""
_MERGE_SPLITS = 16
_MERGE_ELEMENTS = 8192
"""Splits, and elements of their results, that a program merges at a time: 64 registers of 128 threads."""
_MAX_PLANS = 1024
"""Plans that a builder remembers."""
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
    num_splits: int
    """Programs that share the keys of one query block and KV head."""
    merges: bool
    """The last of these programs to finish merges their results; else a second launch does."""


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
    arrivals: torch.Tensor
    """[query blocks x KV heads, at most] int32: splits that have left their results. Zero between launches: the last
    split to arrive sees to it, so launches that share the workspace must follow one another."""
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
        self._plans: dict[tuple[int, int, int, int], LaunchPlan] = {}
        rows, counters = self._workspace_size()
        self.partial_out = torch.empty(rows, spec.head_size, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(rows, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(counters, dtype=torch.int32, device=device)

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
            arrivals=self.arrivals,
            plan=plan,
        )

    def plan(self, *, num_tokens: int, num_reqs: int, max_query_len: int, max_seq_len: int) -> LaunchPlan:
        """The launch for padded sizes and upper bounds; the same object for the same ones, while it is remembered.

        Splits are shared out by true lengths, so a rough bound of them will do: one that many steps have in common.
        """
        max_query_len = min(max_query_len, num_tokens)
        max_seq_len = min(next_power_of_2(max(max_seq_len, 1)), self.max_model_len)
        key = (num_tokens, num_reqs, max_query_len, max_seq_len)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(*key)
        return plan

    def _make_plan(self, num_tokens: int, num_reqs: int, max_query_len: int, max_seq_len: int) -> LaunchPlan:
        group = self.spec.num_heads // self.spec.num_kv_heads
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
            num_splits=max(1, num_splits),
            # One program is slow to merge many rows, and a launch more is little where there are many.
            merges=tile.block_m <= _MOST_ROWS_TO_MERGE,
        )

    def _workspace_size(self) -> tuple[int, int]:
        """(rows, counters): the most rows (token, head, split) and query blocks x KV heads of any plan with more than
        one split.

        `num_splits * num_query_blocks * num_kv_heads` is at most `programs_per_sm * num_sms`, and a query
        block has at most `block_m` rows a KV head.
        """
        spec = self.spec
        rows = counters = 1
        for tile in all_tiles(
            group=spec.num_heads // spec.num_kv_heads,
            head_size=spec.head_size,
            itemsize=spec.dtype.itemsize,
            shared_memory=self.shared_memory,
        ):
            most_programs = tile.programs_per_sm * self.num_sms
            by_length = self.max_num_tokens * spec.num_heads * _max_splits(tile, self.max_model_len)
            rows = max(rows, min(most_programs * tile.block_m, by_length))
            counters = max(counters, most_programs // 2)
        return rows, counters


class TritonAttentionImpl(AttentionImpl[TritonMetadata]):
    """One launch for any batch; and one more where tiles of many rows are split."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.scales = _kernel_scales(spec)
        self.constants = _common_constants(spec)

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: TritonMetadata, out: torch.Tensor) -> None:
        """See `AttentionImpl.forward`. Any strides, with the last dimension contiguous."""
        for kernel, grid, arguments, constants in self._launches(query, kv_cache, metadata, out):
            kernel[grid](*arguments, **constants)

    def bind(self, query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> Callable[[TritonMetadata], None]:
        """See `AttentionImpl.bind`: compiled kernels and their arguments are looked up once."""
        return BoundLaunches(
            lambda metadata: self._launches(query, kv_cache, metadata, out),
            lambda metadata: (metadata.query_start_loc, metadata.seq_lens, metadata.block_table),
        )

    def _launches(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: TritonMetadata, out: torch.Tensor
    ) -> list[Launch]:
        _check_strides(query, kv_cache, out)
        plan = metadata.plan
        if plan.num_query_blocks == 0:
            return []
        launches = [self._attention(query, kv_cache, metadata, out)]
        if plan.num_splits > 1 and not plan.merges:
            launches.append(self._merge(metadata, out))
        return launches

    def _attention(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: TritonMetadata, out: torch.Tensor
    ) -> Launch:
        plan, table = metadata.plan, metadata.block_table
        arguments = (
            query,
            kv_cache,
            out,
            metadata.partial_out,
            metadata.partial_lse,
            metadata.arrivals,
            metadata.query_start_loc,
            metadata.seq_lens,
            table,
            metadata.seq_lens.shape[0],
            plan.num_splits,
            *self.scales,
            *query.stride()[:2],
            *out.stride()[:2],
            *kv_cache.stride()[:4],
            table.stride(0),
        )
        grid = (plan.num_query_blocks, self.spec.num_kv_heads, plan.num_splits)
        return attention_kernel, grid, arguments, {**self.constants, **_attention_constants(plan, self.spec)}

    def _merge(self, metadata: TritonMetadata, out: torch.Tensor) -> Launch:
        plan = metadata.plan
        arguments = (
            metadata.partial_out,
            metadata.partial_lse,
            out,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.seq_lens.shape[0],
            plan.num_splits,
            *out.stride()[:2],
        )
        parts = triton.cdiv(plan.tile.block_m, self.constants["MERGE_ROWS"])
        grid = (plan.num_query_blocks, self.spec.num_kv_heads, parts)
        return merge_kernel, grid, arguments, {**self.constants, **_share_constants(plan, self.spec)}


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
    return triton.cdiv(max_seq_len, tile.split_keys)


def _check_strides(query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> None:
    if query.stride(2) != 1 or kv_cache.stride(4) != 1 or out.stride(2) != 1:
        raise ValueError(
            "triton attention needs contiguous head dimensions (call .contiguous()), got strides "
            f"query {query.stride()}, kv_cache {kv_cache.stride()}, out {out.stride()}"
        )


def _kernel_scales(spec: AttentionSpec) -> tuple[float, float]:
    """qk_scale and soft_cap_log2 of the kernel."""
    if spec.soft_cap is None:
        return spec.scale * _LOG2_E, 0.0
    return spec.scale / spec.soft_cap, spec.soft_cap * _LOG2_E


def _common_constants(spec: AttentionSpec) -> dict[str, int]:
    """What both kernels are compiled for, whatever the batch."""
    group, block_d = spec.num_heads // spec.num_kv_heads, padded_head_size(spec.head_size)
    return {
        "NUM_HEADS": spec.num_heads,
        "GROUP": group,
        "HEAD_SIZE": spec.head_size,
        "BLOCK_D": block_d,
        "WINDOW": spec.sliding_window or 0,
        "MERGE_ROWS": min(next_power_of_2(group), _MERGE_ELEMENTS // (_MERGE_SPLITS * block_d)),
        "MERGE_SPLITS": _MERGE_SPLITS,
    }


def _share_constants(plan: LaunchPlan, spec: AttentionSpec) -> dict[str, int]:
    """How both kernels find a program's work."""
    tile = plan.tile
    # Splits of a decode step are of one length, if they may start at any block: else some have a tile more.
    by_blocks = tile.block_m < 64 and tile.block_n > spec.block_size
    return {
        "BLOCK_Q": plan.block_q,
        "ONE_BLOCK": plan.one_block,
        "UNIT": spec.block_size if by_blocks else tile.block_n,
        "SPLIT_KEYS": tile.split_keys,
    }


def _attention_constants(plan: LaunchPlan, spec: AttentionSpec) -> dict[str, int]:
    """What the attention kernel alone is compiled for."""
    return {
        **_share_constants(plan, spec),
        "BLOCK_SIZE": spec.block_size,
        "BLOCK_M": plan.tile.block_m,
        "BLOCK_N": plan.tile.block_n,
        "SOFT_CAP": spec.soft_cap is not None,
        "SPLIT": plan.num_splits > 1,
        "MERGE": plan.merges,
        "num_warps": plan.tile.num_warps,
        "num_stages": plan.tile.num_stages,
    }
