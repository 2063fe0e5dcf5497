"""Backend `torch`: paged attention in plain PyTorch, on any device. The oracle of every other backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.base import AttentionBackend, AttentionCGSupport, AttentionImpl, MetadataBuilder
from attention.metadata import CommonAttentionMetadata
from attention.specs import AttentionSpec


@dataclass(frozen=True, slots=True)
class TorchMetadata:
    """Views of the runner's buffers; see `CommonAttentionMetadata` for shapes."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_seq_len: int


class TorchMetadataBuilder(MetadataBuilder[TorchMetadata]):
    """Hands the runner's buffers on."""

    # The computation reads lengths from tensors when it runs, never from the host at build time.
    cudagraph_support = AttentionCGSupport.ALWAYS
    advances_on_device = True

    def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> TorchMetadata:
        max_seq_len = self.max_model_len if for_capture else common.max_seq_len
        return TorchMetadata(common.query_start_loc, common.seq_lens, common.block_table, max_seq_len)


class TorchAttentionImpl(AttentionImpl[TorchMetadata]):
    """Request by request on the CPU; everything masked, at fixed shapes, elsewhere."""

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: TorchMetadata, out: torch.Tensor) -> None:
        if query.device.type == "cpu":
            self._forward_ragged(query, kv_cache, metadata, out)
        else:
            self._forward_masked(query, kv_cache, metadata, out)

    def _forward_ragged(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: TorchMetadata, out: torch.Tensor
    ) -> None:
        """Request by request at true lengths: needs lengths on the host, which on the CPU they are."""
        starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        for request, seq_len in enumerate(seq_lens):
            first, last = starts[request], starts[request + 1]
            if last == first:
                continue
            num_blocks = -(-seq_len // self.spec.block_size)
            blocks = kv_cache[metadata.block_table[request, :num_blocks].long()]
            key, value = blocks.transpose(0, 1).flatten(1, 2)[:, :seq_len].unbind(0)
            positions = torch.arange(seq_len - (last - first), seq_len)
            out[first:last] = self._attend(query[first:last], key, value, positions, torch.tensor(seq_len))

    def _forward_masked(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: TorchMetadata, out: torch.Tensor
    ) -> None:
        """Every request against every row, masked: shapes do not depend on the batch's content."""
        num_tokens = query.shape[0]
        rows = torch.arange(num_tokens, device=query.device)
        num_blocks = -(-metadata.max_seq_len // self.spec.block_size)
        for request in range(metadata.seq_lens.shape[0]):
            start, end = metadata.query_start_loc[request], metadata.query_start_loc[request + 1]
            seq_len = metadata.seq_lens[request]
            # Entries past the sequence may be stale: any block will do, since its keys are masked.
            table = metadata.block_table[request, :num_blocks].long().clamp(0, kv_cache.shape[0] - 1)
            key, value = kv_cache[table].transpose(0, 1).flatten(1, 2).unbind(0)
            mine = (rows >= start) & (rows < end)
            result = self._attend(query, key, value, seq_len - (end - rows), seq_len)
            out.copy_(torch.where(mine[:, None, None], result, out))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        seq_len: torch.Tensor,
    ) -> torch.Tensor:
        """query [q, num_heads, d] at `positions` [q]; key, value [n, num_kv_heads, d]. Computed in fp32 at least."""
        spec = self.spec
        compute = torch.promote_types(query.dtype, torch.float32)
        grouped = query.to(compute).unflatten(1, (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads))
        scores = torch.einsum("qhgd,nhd->hgqn", grouped, key.to(compute)) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        keys = torch.arange(key.shape[0], device=key.device)
        visible = (keys <= positions[:, None]) & (keys < seq_len)
        if spec.sliding_window is not None:
            visible &= keys > positions[:, None] - spec.sliding_window
        # Blocks past the sequence hold anything, NaN included: zero weight does not remove NaN values.
        value = torch.where((keys < seq_len)[:, None, None], value.to(compute), 0)
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        return torch.einsum("hgqn,nhd->qhgd", weights, value).flatten(1, 2).to(query.dtype)


class TorchBackend(AttentionBackend):
    """Runs every spec on every device, slowly."""

    name = "torch"

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        return None

    @staticmethod
    def get_builder_cls() -> type[TorchMetadataBuilder]:
        return TorchMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[TorchAttentionImpl]:
        return TorchAttentionImpl
