"""From a batch to what the model reads: input buffers filled in place, then metadata for every attention group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from attention.base import UncapturableMetadata
from attention.groups import AttentionGroup
from attention.metadata import CommonAttentionMetadata
from piecewise_backend.cudagraph.fingerprint import Fingerprint
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.runner.batch import NO_STATE_SLOT, InputBatch, ScheduledRequest
from piecewise_backend.runner.block_tables import BlockTables
from piecewise_backend.runner.buffers import InputBuffers

UNKNOWN = -1
"""Stands for a request's newest token, which the device has by the request's state slot."""


def _token_ids(batch: InputBatch) -> np.ndarray:
    """[num_tokens] int64. ValueError for a token id that is no integer, or negative without meaning."""
    flat: list[int] = []
    for request in batch.requests:
        flat.extend(_as_list(request.token_ids))
    given = np.array(flat)
    if given.dtype.kind != "i" or given.min() < 0:
        for request in batch.requests:
            _check_token_ids(request)
    return given


def _as_list(token_ids: Sequence[int]) -> list[int]:
    return token_ids if isinstance(token_ids, list) else np.asarray(token_ids).tolist()


def _check_token_ids(request: ScheduledRequest) -> None:
    """-1 is allowed for a request with a state slot."""
    given = np.array(_as_list(request.token_ids))
    has_slot = request.state_slot >= 0
    if given.dtype.kind == "i" and given.min() >= (UNKNOWN if has_slot else 0):
        return
    allowed = "integers of 0 or more" + (", or -1 for its newest token" if has_slot else "")
    wrong = (given[given < 0] if given.dtype.kind == "i" else given)[:3].tolist()
    raise ValueError(f"token_ids of request {request.request_id!r} must be {allowed}, got {wrong}")


class GroupNotCapturable(UncapturableMetadata):
    """A group was to be recorded, and its builder cannot give metadata for that."""

    def __init__(self, group: AttentionGroup, descriptor: BatchDescriptor, error: UncapturableMetadata) -> None:
        super().__init__(f"{group}: no capturable metadata for {descriptor}: {error}")
        self.group = group
        self.descriptor = descriptor


class ModelState:
    """The persistent inputs of one model."""

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        buffers: InputBuffers,
        block_tables: BlockTables,
        *,
        max_num_reqs: int,
        max_model_len: int,
    ) -> None:
        self.groups = tuple(groups)
        self.buffers = buffers
        self.block_tables = block_tables
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len

    def prepare_inputs(self, batch: InputBatch, num_tokens: int) -> None:
        """Begin a step: write token ids and positions, padded with zeros to `num_tokens`. `prepare_attn` sends them."""
        self.buffers.arena.begin()
        num_real, ids, positions = batch.num_tokens, self.buffers.input_ids.np, self.buffers.positions.np
        ids[:num_real] = _token_ids(batch)
        positions[:num_real] = batch.positions
        ids[num_real:num_tokens] = 0
        positions[num_real:num_tokens] = 0
        self.buffers.logits_rows.np[: len(batch.logits_rows)] = batch.logits_rows

    def prepare_attn(
        self,
        batch: InputBatch,
        descriptor: BatchDescriptor,
        *,
        recorded_layers: frozenset[str] = frozenset(),
        for_capture: bool = False,
    ) -> dict[str, Any]:
        """Metadata of every attention layer, built group by group, in every mode; after `prepare_inputs`.

        `recorded_layers`: those whose operators are, or are about to be, inside of a graph for `descriptor`. A group's
        `for_capture` is true exactly when a graph is being recorded (`for_capture`) and the group is in it. Recorded
        groups are told the descriptor's padded sizes and bounds, at capture as at replay, so that both lead to the
        same kernel; the others are told the batch's own. GroupNotCapturable where a builder refuses.
        """
        common = self._common(batch, descriptor)
        exact: CommonAttentionMetadata | None = None
        metadata: dict[str, Any] = {}
        for group in self.groups:
            recorded = recorded_layers.issuperset(group.layer_names)
            if not recorded and exact is None:
                exact = self._exact(common, batch)
            facts = common if recorded or exact is None else exact
            try:
                built = group.builder.build(facts, for_capture=recorded and for_capture)
            except UncapturableMetadata as error:
                raise GroupNotCapturable(group, descriptor, error) from error
            metadata.update(dict.fromkeys(group.layer_names, built))
        return metadata

    def prepare_inputs_to_capture(
        self,
        descriptor: BatchDescriptor,
        *,
        full_cudagraph: bool,
        recorded_layers: frozenset[str] = frozenset(),
        headroom: int = 0,
    ) -> dict[str, Any]:
        """Dummy batch, dummy block tables and slots, then metadata for every group: always built, in every mode.

        `full_cudagraph`: every operator is about to be recorded; else those of `recorded_layers`. `headroom`: tokens
        that the recorded work itself adds to each sequence.
        """
        if full_cudagraph:
            recorded_layers = frozenset(name for group in self.groups for name in group.layer_names)
        longest = self.max_model_len - headroom
        batch = InputBatch.make_dummy(descriptor, max_num_reqs=self.max_num_reqs, max_model_len=longest)
        self.prepare_inputs(batch, descriptor.num_tokens)
        return self.prepare_attn(batch, descriptor, recorded_layers=recorded_layers, for_capture=True)

    def any_batch(self) -> CommonAttentionMetadata:
        """Facts of a dummy batch of one token: tensors of the layout that every batch's have."""
        descriptor = BatchDescriptor(mode=CUDAGraphMode.NONE, num_tokens=1)
        batch = InputBatch.make_dummy(descriptor, max_num_reqs=1, max_model_len=self.max_model_len)
        self.prepare_inputs(batch, descriptor.num_tokens)
        return self._common(batch, descriptor)

    def fingerprints(self, metadata: dict[str, Any], recorded_layers: frozenset[str]) -> tuple[Fingerprint, ...]:
        """What a graph just recorded with `metadata` reads of it."""
        return tuple(
            Fingerprint.take(
                metadata[group.layer_names[0]],
                layer=group.layer_names[0],
                backend=group.backend.name,
                unrecorded=type(group.builder).unrecorded_fields,
            )
            for group in self.groups
            if recorded_layers.issuperset(group.layer_names)
        )

    def _common(self, batch: InputBatch, descriptor: BatchDescriptor) -> CommonAttentionMetadata:
        num_tokens = descriptor.num_tokens
        num_reqs = descriptor.num_reqs or batch.num_reqs
        buffers, tables = self.buffers, self.block_tables
        self._write_request_facts(batch, num_tokens, num_reqs)
        if batch.is_dummy:
            tables.get_dummy_block_tables(num_tokens, num_reqs)
        else:
            tables.write(batch, num_tokens, num_reqs)
        buffers.arena.send()
        return CommonAttentionMetadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            num_actual_tokens=batch.num_tokens,
            max_query_len=descriptor.max_query_len or batch.max_query_len,
            max_seq_len=self.max_model_len,
            query_start_loc=buffers.query_start_loc.first(num_reqs + 1),
            query_start_loc_cpu=buffers.query_start_loc.first_on_host(num_reqs + 1),
            seq_lens=buffers.seq_lens.first(num_reqs),
            seq_lens_cpu=buffers.seq_lens.first_on_host(num_reqs),
            block_table=buffers.block_table.first(num_reqs),
            slot_mapping=buffers.slot_mapping.first(num_tokens),
            token_request=buffers.token_request.first(num_tokens),
            state_slots=buffers.state_slots.first(num_reqs),
        )

    def _write_request_facts(self, batch: InputBatch, num_tokens: int, num_reqs: int) -> None:
        buffers = self.buffers
        buffers.query_start_loc.np[: batch.num_reqs + 1] = batch.query_start_loc
        buffers.query_start_loc.np[batch.num_reqs + 1 : num_reqs + 1] = batch.num_tokens
        buffers.seq_lens.np[: batch.num_reqs] = batch.seq_lens
        buffers.seq_lens.np[batch.num_reqs : num_reqs] = 0
        buffers.token_request.np[: batch.num_tokens] = batch.token_request
        buffers.token_request.np[batch.num_tokens : num_tokens] = -1
        buffers.state_slots.np[: batch.num_reqs] = [r.state_slot for r in batch.requests]
        buffers.state_slots.np[batch.num_reqs : num_reqs] = NO_STATE_SLOT

    def _exact(self, common: CommonAttentionMetadata, batch: InputBatch) -> CommonAttentionMetadata:
        """The same without padded requests and with the batch's own bounds, for kernels that run between graphs."""
        num_reqs, buffers = batch.num_reqs, self.buffers
        return dataclasses.replace(
            common,
            num_reqs=num_reqs,
            query_start_loc=buffers.query_start_loc.first(num_reqs + 1),
            query_start_loc_cpu=buffers.query_start_loc.first_on_host(num_reqs + 1),
            seq_lens=buffers.seq_lens.first(num_reqs),
            seq_lens_cpu=buffers.seq_lens.first_on_host(num_reqs),
            block_table=buffers.block_table.first(num_reqs),
            state_slots=buffers.state_slots.first(num_reqs),
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
        )
