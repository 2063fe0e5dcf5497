"""Every backend against one plain oracle, on the CPU."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from tests.attention.backend_cases import MAX_MODEL_LEN, SPEC, backends, make, padded_batch
from tests.attention.oracle import Case, PagedBatch, grid


@backends
@pytest.mark.parametrize("case", grid(torch.float16), ids=str)
def test_a_backend_agrees_with_dense_attention(name: str, case: Case) -> None:
    batch = padded_batch(name, case.spec, case.lengths)
    builder, impl = make(name, case.spec, batch)
    impl.forward(batch.query, batch.kv_cache, builder.build(batch.common(), for_capture=False), batch.out)
    batch.assert_out_is_right()


@backends
@pytest.mark.parametrize("max_query_len", [1, 5, 100], ids="at most {} tokens a request".format)
def test_metadata_built_for_capture_serves_whatever_is_in_its_buffers_later(name: str, max_query_len: int) -> None:
    """What a graph replay does: the same launch, the same addresses, another batch."""
    num_reqs, num_tokens = 6, min(100, 6 * max_query_len)
    batch = PagedBatch(
        SPEC,
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_model_len=MAX_MODEL_LEN,
        stale_table=name == "torch masked",
    )
    builder, impl = make(name, SPEC, batch)
    batch.fill([(1, 1)] * num_reqs)
    metadata = builder.build(batch.common(max_query_len=max_query_len), for_capture=True)
    rng = random.Random(0)
    for _ in range(3):
        batch.fill_at_random(rng, max_query_len=max_query_len)
        impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
        batch.assert_out_is_right()


@backends
def test_builders_give_the_same_addresses_for_every_batch_of_a_padded_size(name: str) -> None:
    batch = padded_batch(name, SPEC, [(1, 5), (1, 200)])
    builder, _ = make(name, SPEC, batch)

    def addresses() -> list[tuple[int, torch.Size]]:
        metadata = builder.build(batch.common(max_query_len=8), for_capture=True)
        values = [getattr(metadata, field.name) for field in dataclasses.fields(metadata)]
        return [(value.data_ptr(), value.shape) for value in values if isinstance(value, torch.Tensor)]

    before = addresses()
    batch.fill([(3, 7)])
    assert addresses() == before
    assert len(before) >= 3


@backends
def test_strided_queries_and_outputs_are_read_and_written_in_place(name: str) -> None:
    """Queries are slices of a fused projection, and outputs may be rows of something wider."""
    batch = padded_batch(name, SPEC, [(20, 40), (1, 33)])
    builder, impl = make(name, SPEC, batch)
    num_tokens, num_heads, head_size = batch.query.shape
    fused = torch.full((num_tokens, (num_heads + 4) * head_size), float("nan"), dtype=SPEC.dtype)
    query = fused[:, : num_heads * head_size].view(num_tokens, num_heads, head_size)
    query.copy_(batch.query)
    wide = torch.full((num_tokens, 2, num_heads, head_size), float("nan"), dtype=SPEC.dtype)
    impl.forward(query, batch.kv_cache, builder.build(batch.common(), for_capture=False), wide[:, 1])
    batch.out.copy_(wide[:, 1])
    batch.assert_out_is_right()
    assert wide[:, 0].isnan().all()


@backends
def test_a_breakpoint_may_pass_the_real_rows_alone(name: str) -> None:
    batch = padded_batch(name, SPEC, [(20, 40), (1, 33)])
    builder, impl = make(name, SPEC, batch)
    metadata = builder.build(batch.common(), for_capture=False)
    impl.forward(batch.query[:21], batch.kv_cache, metadata, batch.out[:21])
    batch.assert_out_is_right()
