"""What the Triton backend supports, and its launches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import triton

from attention.backends.triton.bound import BoundLaunches
from attention.backends.triton.kernels import attention_kernel
from attention.backends.triton.merge import merge_kernel
from attention.backends.triton.plan import LaunchPlan, TritonMetadata, TritonMetadataBuilder
from attention.backends.triton.tiles import (
    MAX_GROUP,
    next_power_of_2,
    padded_head_size,
)
from attention.base import AttentionBackend, AttentionImpl
from attention.kernels.ahead import Launch
from attention.kernels.overlap import overlap_constants
from attention.metadata import CommonAttentionMetadata
from attention.specs import AttentionSpec

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter. Settled when they are decorated, so read once, here."""

_MAX_HEAD_SIZE = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MERGE_SPLITS = 16
_MERGE_ELEMENTS = 8192
"""Splits, and elements of their results, that a program merges at a time: 64 registers of 128 threads."""
_LOG2_E = math.log2(math.e)


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

    def launches_ahead(
        self,
        builder: TritonMetadataBuilder,
        common: CommonAttentionMetadata,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> Sequence[Launch]:
        """See `AttentionImpl.launches_ahead`."""
        metadata = builder.build(common, for_capture=False)
        plans = (dataclasses.replace(metadata, plan=plan) for plan in builder.plans_ahead())
        return [launch for like in plans for launch in self._launches(query, kv_cache, like, out)]

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
        constants = {
            **self.constants,
            **_attention_constants(plan, self.spec),
            **overlap_constants(metadata.seq_lens.device),
        }
        return attention_kernel, grid, arguments, constants

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
