"""The launch of the Triton backend for a batch: a function of padded sizes and bounds, and the workspace it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
import triton

from attention.backends.limits import BuilderLimits
from attention.backends.triton.tiles import Tile, all_tiles, choose_tile, next_power_of_2
from attention.base import AttentionCGSupport, MetadataBuilder
from attention.metadata import CommonAttentionMetadata
from attention.specs import AttentionSpec

_MOST_ROWS_TO_MERGE = 32
"""Rows of a tile that one program may have to merge over all splits."""
_MAX_PLANS = 1024
"""Plans that a builder remembers."""


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

    def __init__(self, spec: AttentionSpec, **limits: Unpack[BuilderLimits]) -> None:
        super().__init__(spec, **limits)
        device = self.device
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

    def plans_ahead(self) -> list[LaunchPlan]:
        """A plan for each pair of kernels that some batch within the limits needs: of one request, on either side of
        every length at which tiles change, with the fewest keys and with the most."""
        group, most = self.spec.num_heads // self.spec.num_kv_heads, self.max_num_tokens
        blocks = [tile.block_m // group for tile in self._tiles()]
        lengths = {min(length, most) for block_q in blocks for length in (1, block_q, block_q + 1, most)}
        plans: dict[tuple[Tile, bool, bool], LaunchPlan] = {}
        for length in sorted(lengths):
            for keys in (1, self.max_model_len):
                plan = self.plan(num_tokens=length, num_reqs=1, max_query_len=length, max_seq_len=keys)
                plans.setdefault((plan.tile, plan.one_block, plan.num_splits > 1), plan)
        return list(plans.values())

    def _workspace_size(self) -> tuple[int, int]:
        """(rows, counters): the most rows (token, head, split) and query blocks x KV heads of any plan with more than
        one split.

        `num_splits * num_query_blocks * num_kv_heads` is at most `programs_per_sm * num_sms`, and a query
        block has at most `block_m` rows a KV head.
        """
        rows = counters = 1
        for tile in self._tiles():
            most_programs = tile.programs_per_sm * self.num_sms
            by_length = self.max_num_tokens * self.spec.num_heads * _max_splits(tile, self.max_model_len)
            rows = max(rows, min(most_programs * tile.block_m, by_length))
            counters = max(counters, most_programs // 2)
        return rows, counters

    def _tiles(self) -> tuple[Tile, ...]:
        spec = self.spec
        return all_tiles(
            group=spec.num_heads // spec.num_kv_heads,
            head_size=spec.head_size,
            itemsize=spec.dtype.itemsize,
            shared_memory=self.shared_memory,
        )


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
