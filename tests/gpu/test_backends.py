"""The Triton backend compiled for a GPU: against the oracle, and recorded in real CUDA graphs."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from attention.backends.pytorch import TorchBackend
from attention.base import AttentionBackend, AttentionImpl, MetadataBuilder
from attention.ops import write_kv_cache
from attention.registry import choose_backend, get_backend
from attention.specs import AttentionSpec
from tests.attention.oracle import Case, PagedBatch, grid

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def make(backend: type[AttentionBackend], batch: PagedBatch) -> tuple[MetadataBuilder[Any], AttentionImpl[Any]]:
    builder: Any = backend.get_builder_cls()(batch.spec, **batch.limits)
    if backend.name == "triton":
        builder.partial_out.fill_(float("nan"))
        builder.partial_lse.fill_(float("nan"))
    return builder, backend.get_impl_cls()(batch.spec)


@pytest.fixture
def backend() -> type[AttentionBackend]:
    return get_backend("triton")


@pytest.mark.parametrize("case", [*grid(torch.bfloat16), *grid(torch.float16)], ids=str)
@pytest.mark.parametrize("max_model_len", [256, 8192], ids="model length {}".format)
def test_the_backend_agrees_with_dense_attention(
    backend: type[AttentionBackend], case: Case, max_model_len: int
) -> None:
    """A longer model splits the keys further: for capture, plans are made for its length."""
    batch = PagedBatch.padded(case.spec, case.lengths, max_model_len=max_model_len, device=CUDA)
    builder, impl = make(backend, batch)
    impl.forward(batch.query, batch.kv_cache, builder.build(batch.common(), for_capture=True), batch.out)
    batch.assert_out_is_right()


LARGE = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, block_size=16, dtype=torch.bfloat16, scale=128**-0.5)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_heads": 40, "num_kv_heads": 40, "head_size": 64, "block_size": 64},
        {"num_heads": 64, "num_kv_heads": 1, "sliding_window": 1000},
        {"num_heads": 16, "num_kv_heads": 8, "head_size": 256, "soft_cap": 5.0, "block_size": 32},
        {"num_heads": 12, "num_kv_heads": 4, "head_size": 80, "block_size": 128, "dtype": torch.float16},
        {"head_size": 256, "num_heads": 8, "num_kv_heads": 2, "dtype": torch.float32},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "requests",
    [
        [(1, 4000), (1, 1), (1, 2049), (1, 33)],
        [(4, 4000), (4, 4), (4, 1025)],
        [(700, 700), (1, 3000), (130, 2500), (1, 64), (257, 512)],
        [(1500, 4000)],
    ],
    ids=["decode", "speculative", "mixed", "long chunk"],
)
def test_long_sequences_agree_with_dense_attention(
    backend: type[AttentionBackend], change: dict[str, Any], requests: list[tuple[int, int]]
) -> None:
    batch = PagedBatch(
        dataclasses.replace(LARGE, **change),
        num_tokens=sum(query_len for query_len, _ in requests) + 7,
        num_reqs=len(requests) + 1,
        max_model_len=4096,
        device=CUDA,
    )
    batch.fill(requests)
    builder, impl = make(backend, batch)
    impl.forward(batch.query, batch.kv_cache, builder.build(batch.common(), for_capture=False), batch.out)
    batch.assert_out_is_right()


@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "max_query_len"),
    [(1, 1, 1), (16, 16, 1), (32, 8, 4), (40, 2, 40), (256, 8, 256), (64, 64, 64)],
    ids=["one decode", "decodes", "speculative", "small mixed", "mixed", "many small"],
)
@pytest.mark.parametrize(
    "change", [{}, {"sliding_window": 300, "num_heads": 12, "num_kv_heads": 4}, {"head_size": 80}], ids=str
)
def test_a_graph_recorded_on_one_batch_is_right_for_twenty_others(
    backend: type[AttentionBackend],
    change: dict[str, Any],
    num_tokens: int,
    num_reqs: int,
    max_query_len: int,
) -> None:
    batch = PagedBatch(
        dataclasses.replace(LARGE, **change),
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_model_len=2048,
        device=CUDA,
    )
    batch.fill([(1, 1)] * num_reqs)
    builder, impl = make(backend, batch)
    common = batch.common(max_query_len=max_query_len)
    # Compiles the kernels, which a capture must not.
    impl.forward(batch.query, batch.kv_cache, builder.build(common, for_capture=True), batch.out)
    metadata = builder.build(common, for_capture=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(batch.query, batch.kv_cache, metadata, batch.out)

    rng = random.Random(0)
    for _ in range(20):
        batch.fill_at_random(rng, max_query_len=max_query_len)
        graph.replay()
        batch.assert_out_is_right()
        assert not metadata.arrivals.any()


@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (64, 1)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4], ids="{} tokens a request".format)
def test_replays_give_the_same_bits_whichever_split_comes_last(
    backend: type[AttentionBackend], heads: tuple[int, int], num_tokens: int
) -> None:
    spec = dataclasses.replace(LARGE, num_heads=heads[0], num_kv_heads=heads[1])
    batch = PagedBatch(spec, num_tokens=2 * num_tokens, num_reqs=2, max_model_len=4096, device=CUDA)
    batch.fill([(num_tokens, 4000), (num_tokens, 1031)])
    builder, impl = make(backend, batch)
    metadata = builder.build(batch.common(), for_capture=True)
    assert metadata.plan.num_splits > 1
    impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
    batch.assert_out_is_right()
    first, graph = batch.out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
    for _ in range(100):
        batch.out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(batch.out, first)
        # Between replays only: those inside a graph must find what the one before them left.
        metadata.partial_out.fill_(float("nan"))
        metadata.partial_lse.fill_(float("nan"))
    assert not metadata.arrivals.any()


def test_a_cache_of_more_than_two_to_the_31_elements_is_addressed_right(
    backend: type[AttentionBackend],
) -> None:
    spec = dataclasses.replace(LARGE, num_kv_heads=32)
    small = PagedBatch(spec, num_tokens=8, num_reqs=2, max_model_len=64, device=CUDA)
    small.fill([(7, 40), (1, 64)])
    per_block = small.kv_cache[0].numel()
    far = (1 << 31) // per_block + 5
    kv_cache = torch.zeros(far + len(small.kv_cache), *small.kv_cache.shape[1:], dtype=spec.dtype, device=CUDA)
    kv_cache[far:] = small.kv_cache
    small.block_table += far
    builder, impl = make(backend, small)
    metadata = builder.build(small.common(), for_capture=False)
    impl.forward(small.query, kv_cache, metadata, small.out)
    small.assert_out_is_right()

    slots = small.slot_mapping + far * spec.block_size
    slots[7] = -1
    key, value = torch.randn(2, 8, spec.num_kv_heads, spec.head_size, device=CUDA).to(spec.dtype)
    write_kv_cache(key, value, kv_cache, slots)
    block, offset = slots[:7] // spec.block_size, slots[:7] % spec.block_size
    assert torch.equal(kv_cache[block, 0, offset], key[:7])
    assert torch.equal(kv_cache[block, 1, offset], value[:7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_recorded_cache_write_follows_its_slots(dtype: torch.dtype) -> None:
    num_tokens, num_kv_heads, head_size, block_size = 64, 3, 80, 16
    fused = torch.randn(num_tokens, 2, num_kv_heads, head_size, device=CUDA).to(dtype)
    key, value = fused.unbind(1)
    slots = torch.full((num_tokens + 9,), -1, device=CUDA)
    kv_cache = torch.randn(40, 2, block_size, num_kv_heads, head_size, device=CUDA).to(dtype)
    write_kv_cache(key, value, kv_cache, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_kv_cache(key, value, kv_cache, slots)
    for true_tokens in (64, 13, 0):
        fused.copy_(torch.randn_like(fused))
        expected = kv_cache.clone()
        slots.fill_(-1)
        slots[:true_tokens] = torch.randperm(40 * block_size, device=CUDA)[:true_tokens]
        block, offset = slots[:true_tokens] // block_size, slots[:true_tokens] % block_size
        expected[block, 0, offset] = key[:true_tokens]
        expected[block, 1, offset] = value[:true_tokens]
        graph.replay()
        assert torch.equal(kv_cache, expected)


@pytest.mark.parametrize("case", grid(torch.bfloat16)[::3], ids=str)
def test_the_torch_backend_agrees_with_dense_attention_on_a_gpu(case: Case) -> None:
    batch = PagedBatch(
        case.spec,
        num_tokens=sum(query_len for query_len, _ in case.lengths) + 5,
        num_reqs=len(case.lengths) + 2,
        max_model_len=256,
        device=CUDA,
        stale_table=True,
    )
    batch.fill(case.lengths)
    builder, impl = make(TorchBackend, batch)
    impl.forward(batch.query, batch.kv_cache, builder.build(batch.common(), for_capture=True), batch.out)
    batch.assert_out_is_right()


def test_a_gpu_gets_the_triton_backend(backend: type[AttentionBackend]) -> None:
    choice = choose_backend(LARGE, CUDA)
    assert choice.backend is backend
    assert choice.passed_over == ()
