"""Splits of the KV axis by the Triton backend, on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.attention.backend_cases import SPEC, make
from tests.attention.oracle import PagedBatch

SPLIT = dataclasses.replace(SPEC, num_kv_heads=1, sliding_window=None)
LENGTHS = {
    "more splits than keys": [(1, 1), (1, 3), (1, 15)],
    "one split with keys": [(1, 64), (1, 16), (1, 5)],
    "a last split of one key": [(1, 65), (1, 129), (1, 577)],
    "all splits": [(1, 1024), (1, 1000), (1, 1009)],
    "some of everything": [(1, 1024), (1, 2), (0, 0)],
    "speculation": [(4, 1001), (1, 64), (3, 3)],
    "a chunk": [(40, 1020), (2, 70)],
    "chunks": [(30, 31), (16, 900)],
}


def split_batch(name: str) -> tuple[PagedBatch, int]:
    """A batch of LENGTHS, and the most tokens that a request of its kind has."""
    most = max(query_len for query_len, _ in LENGTHS[name])
    batch = PagedBatch(SPLIT, num_tokens=max(6, 3 * min(most, 20)), num_reqs=3, max_model_len=1024)
    batch.fill(LENGTHS[name])
    return batch, {1: 1, 4: 4}.get(most, 60)


@pytest.mark.parametrize("name", LENGTHS)
def test_triton_divides_true_lengths_among_its_splits_and_leaves_its_counters_at_zero(name: str) -> None:
    batch, max_query_len = split_batch(name)
    builder, impl = make("triton", SPLIT, batch)
    metadata = builder.build(batch.common(max_query_len=max_query_len), for_capture=True)
    assert metadata.plan.num_splits > 1
    assert metadata.plan.merges == (max_query_len <= 4)
    for again in [name, "more splits than keys", "some of everything", name]:
        # What an earlier launch left is neither read nor needed.
        metadata.partial_out.fill_(float("nan"))
        metadata.partial_lse.fill_(float("nan"))
        batch.fill(LENGTHS[again])
        impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
        batch.assert_out_is_right()
        assert not metadata.arrivals.any()


def test_triton_uses_as_many_splits_for_a_short_sequence_as_for_a_long_one_where_keys_suffice() -> None:
    batch = PagedBatch(SPLIT, num_tokens=1, num_reqs=1, max_model_len=1 << 14)
    builder, impl = make("triton", SPLIT, batch)
    batch.fill([(1, 1000)])
    metadata = builder.build(batch.common(), for_capture=True)
    impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
    batch.assert_out_is_right()
    written = metadata.partial_lse.view(-1)[: SPLIT.num_heads * metadata.plan.num_splits]
    assert (~written.isnan()).view(SPLIT.num_heads, -1).sum(1).tolist() == [8] * SPLIT.num_heads


@pytest.mark.parametrize("name", ["all splits", "speculation", "a chunk"])
def test_triton_gives_the_same_bits_whichever_split_comes_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, max_query_len = split_batch(name)
    builder, impl = make("triton", SPLIT, batch)
    metadata = builder.build(batch.common(max_query_len=max_query_len), for_capture=True)
    impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
    first = batch.out.clone()
    from triton.runtime.interpreter import interpreter_builder

    in_order = interpreter_builder.set_grid_idx
    arrangements: list[Any] = [
        lambda x, y, z, splits: splits - 1 - z,
        lambda x, y, z, splits: (z + splits // 2) % splits,
        lambda x, y, z, splits: z,
    ]
    for arrangement in arrangements:

        def set_index(x: int, y: int, z: int, arrangement: Any = arrangement) -> None:
            in_order(x, y, arrangement(x, y, z, interpreter_builder.grid_dim[2]))

        monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_index)
        batch.out.fill_(float("nan"))
        impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
        true = len(batch.expected)
        assert torch.equal(batch.out[:true], first[:true])
        assert not metadata.arrivals.any()


def test_triton_merges_more_splits_than_it_holds_at_a_time() -> None:
    spec = dataclasses.replace(SPLIT, dtype=torch.float32)
    batch = PagedBatch(spec, num_tokens=1, num_reqs=1, max_model_len=2048)
    batch.fill([(1, 2000)])
    builder, impl = make("triton", spec, batch)
    metadata = builder.build(batch.common(), for_capture=True)
    assert metadata.plan.num_splits > 20
    impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
    batch.assert_out_is_right()
