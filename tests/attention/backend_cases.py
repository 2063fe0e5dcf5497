"""Attention backends as the tests make them, on the CPU: Triton's kernels run in its interpreter.

The interpreter must be on before triton is imported; `tests/conftest.py` sees to it where there is no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention.backends.pytorch import TorchAttentionImpl, TorchMetadata
from attention.base import AttentionImpl, MetadataBuilder
from attention.registry import get_backend
from attention.specs import AttentionSpec
from tests.attention.oracle import PagedBatch, Requests
from tests.attention.serving import skip_without_interpreter

CPU = torch.device("cpu")
MAX_MODEL_LEN = 256


class MaskedTorchImpl(TorchAttentionImpl):
    """The torch backend as it runs on a GPU: shapes that do not depend on the batch's content."""

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: TorchMetadata, out: torch.Tensor) -> None:
        self._forward_masked(query, kv_cache, metadata, out)


def make(name: str, spec: AttentionSpec, batch: PagedBatch) -> tuple[MetadataBuilder[Any], AttentionImpl[Any]]:
    """The builder and the computation of one of: torch, torch masked, triton."""
    if name == "triton":
        skip_without_interpreter()
    backend = get_backend(name.split()[0])
    assert backend.unsupported_reason(spec, batch.device) is None
    builder: Any = backend.get_builder_cls()(spec, **batch.limits)
    if name == "triton":
        builder.partial_out.fill_(float("nan"))
        builder.partial_lse.fill_(float("nan"))
    impl_cls = MaskedTorchImpl if name == "torch masked" else backend.get_impl_cls()
    return builder, impl_cls(spec)


def padded_batch(name: str, spec: AttentionSpec, requests: Requests) -> PagedBatch:
    """A batch of `requests`, with room for padding."""
    # The masked path gathers the whole table: past a sequence, too, it must find ids of blocks.
    return PagedBatch.padded(spec, requests, max_model_len=MAX_MODEL_LEN, stale_table=name == "torch masked")


backends = pytest.mark.parametrize("name", ["torch", "torch masked", "triton"])
SPEC = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    block_size=16,
    dtype=torch.float16,
    scale=0.125,
    sliding_window=90,
)
