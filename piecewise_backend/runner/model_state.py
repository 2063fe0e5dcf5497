"""From a batch to what the model reads: input buffers filled in place, then metadata for every attention group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attention.groups import AttentionGroup
from attention.metadata import CommonAttentionMetadata
from piecewise_backend.cudagraph.modes import BatchDescriptor
from piecewise_backend.runner.batch import InputBatch
from piecewise_backend.runner.block_tables import BlockTables
from piecewise_backend.runner.buffers import InputBuffers


class ModelState:
    """The persistent inputs of one model."""

    def __init__(
        self, groups: Sequence[AttentionGroup], buffers: InputBuffers, block_tables: BlockTables, max_model_len: int
    ) -> None:
        self.groups = tuple(groups)
        self.buffers = buffers
        self.block_tables = block_tables
        self.max_model_len = max_model_len

    def prepare_inputs(self, batch: InputBatch, num_tokens: int) -> None:
        """Write token ids and positions, padded with zeros to `num_tokens`."""
        ids, positions = self.buffers.input_ids, self.buffers.positions
        for request, start in zip(batch.requests, batch.query_start_loc, strict=False):
            length = len(request.token_ids)
            ids.np[start : start + length] = request.token_ids
            positions.np[start : start + length] = np.arange(
                request.num_computed_tokens, request.num_computed_tokens + length
            )
        ids.np[batch.num_tokens : num_tokens] = 0
        positions.np[batch.num_tokens : num_tokens] = 0
        ids.copy_to_device(num_tokens)
        positions.copy_to_device(num_tokens)

    def prepare_attn(
        self,
        batch: InputBatch,
        descriptor: BatchDescriptor,
        *,
        recorded_layers: frozenset[str] = frozenset(),
        for_capture: bool = False,
        is_dummy: bool = False,
    ) -> dict[str, Any]:
        """Metadata of every attention layer, built group by group; after `prepare_inputs`.

        Metadata is built in every mode. A group's `for_capture` is true exactly when a graph is being recorded
        (`for_capture`) and the group's operators are recorded into it (`recorded_layers`).
        """
        common = self._common(batch, descriptor, for_capture=for_capture, is_dummy=is_dummy)
        metadata: dict[str, Any] = {}
        for group in self.groups:
            recorded = for_capture and recorded_layers.issuperset(group.layer_names)
            built = group.builder.build(common, for_capture=recorded)
            metadata.update(dict.fromkeys(group.layer_names, built))
        return metadata

    def _common(
        self, batch: InputBatch, descriptor: BatchDescriptor, *, for_capture: bool, is_dummy: bool
    ) -> CommonAttentionMetadata:
        num_tokens = descriptor.num_tokens
        num_reqs = descriptor.num_reqs or batch.num_reqs
        buffers, tables = self.buffers, self.block_tables
        starts, lengths = buffers.query_start_loc, buffers.seq_lens
        starts.np[: batch.num_reqs + 1] = batch.query_start_loc
        starts.np[batch.num_reqs + 1 : num_reqs + 1] = batch.num_tokens
        lengths.np[: batch.num_reqs] = batch.seq_lens
        lengths.np[batch.num_reqs : num_reqs] = 0
        write = tables.get_dummy_block_tables if is_dummy else None
        block_table, slots = write(num_tokens, num_reqs) if write else tables.write(batch, num_tokens, num_reqs)
        return CommonAttentionMetadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_actual_tokens=batch.num_tokens,
            max_query_len=descriptor.max_query_len or batch.max_query_len,
            max_seq_len=self.max_model_len if for_capture else batch.max_seq_len,
            query_start_loc=starts.copy_to_device(num_reqs + 1),
            query_start_loc_cpu=starts.cpu[: num_reqs + 1],
            seq_lens=lengths.copy_to_device(num_reqs),
            seq_lens_cpu=lengths.cpu[:num_reqs],
            block_table=block_table,
            slot_mapping=slots,
        )
