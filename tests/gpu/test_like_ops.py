"""Operators like attention, compiled for a GPU: against dense results, and recorded in real CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

from attention.backends.compressed_attention import CompressedAttentionBackend
from attention.backends.kv_compressor import KVCompressorBackend
from attention.backends.short_conv import ShortConvBackend
from attention.ops import write_cache
from tests.attention.serving import LENGTHS, SIZES, Chunk, Sizes, random_schedule
from tests.attention.test_compressed_attention import CompressedAttention
from tests.attention.test_kv_compressor import Compressor
from tests.attention.test_short_conv import Conv

pytestmark = pytest.mark.gpu

T = TypeVar("T")
LARGE = Sizes(max_chunk=100, num_blocks=14, block_size=64)
LONG = (300, 1, 128, 70, 63)
INERT = Chunk(sequence=0, start=0, length=1, right=1, slot=-1)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
drafts = pytest.mark.parametrize("num_draft_tokens", [0, 3], ids="{} drafts".format)


def recorded(run: Callable[[], T]) -> Callable[[], T]:
    """`run` as a graph: replays read and write the tensors of the recording, and give its result."""
    run()  # compiles the kernels, which a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> T:
        graph.replay()
        return result

    return replay


@dtypes
@drafts
@pytest.mark.parametrize(
    "change", [{}, {"kernel_size": 2, "bias": False}, {"silu": False, "dim": 130}, {"kernel_size": 7}], ids=str
)
def test_a_short_conv_gives_the_dense_result(dtype: torch.dtype, num_draft_tokens: int, change: dict[str, Any]) -> None:
    conv = Conv("kernels", dtype, num_draft_tokens=num_draft_tokens, device="cuda", **change)
    conv.serve(random_schedule(LENGTHS, SIZES, seed=1, num_draft_tokens=num_draft_tokens))


@dtypes
def test_a_wide_short_conv_gives_the_dense_result(dtype: torch.dtype) -> None:
    conv = Conv("kernels", dtype, dim=3000, lengths=LONG, sizes=LARGE, device="cuda")
    conv.serve(random_schedule(LONG, LARGE, seed=2))


@dtypes
@drafts
def test_a_short_conv_recorded_on_an_inert_batch_is_right_for_others(dtype: torch.dtype, num_draft_tokens: int) -> None:
    conv = Conv("kernels", dtype, num_draft_tokens=num_draft_tokens, device="cuda")
    conv.batch.load([INERT], num_tokens=SIZES.max_num_tokens)
    schedule = random_schedule(LENGTHS, SIZES, seed=3, num_draft_tokens=num_draft_tokens)
    conv.serve(schedule, recorded(conv.run), num_tokens=SIZES.max_num_tokens)


@dtypes
@drafts
@pytest.mark.parametrize("change", [{}, {"ratio": 2, "dim": 16}, {"ratio": 8, "dim": 130}, {"score_dim": 1}], ids=str)
def test_a_kv_compressor_gives_the_dense_entries(
    dtype: torch.dtype, num_draft_tokens: int, change: dict[str, Any]
) -> None:
    compressor = Compressor("kernels", dtype, num_draft_tokens=num_draft_tokens, device="cuda", **change)
    compressor.serve(random_schedule(LENGTHS, SIZES, seed=1, num_draft_tokens=num_draft_tokens))


@dtypes
@pytest.mark.parametrize("ratio", [4, 64])
def test_a_wide_kv_compressor_gives_the_dense_entries(dtype: torch.dtype, ratio: int) -> None:
    compressor = Compressor("kernels", dtype, dim=512, ratio=ratio, lengths=LONG, sizes=LARGE, device="cuda")
    compressor.serve(random_schedule(LONG, LARGE, seed=2))


@dtypes
@drafts
def test_a_kv_compressor_recorded_on_an_inert_batch_is_right_for_others(
    dtype: torch.dtype, num_draft_tokens: int
) -> None:
    compressor = Compressor("kernels", dtype, num_draft_tokens=num_draft_tokens, device="cuda")
    compressor.batch.load([INERT], num_tokens=SIZES.max_num_tokens)
    schedule = random_schedule(LENGTHS, SIZES, seed=3, num_draft_tokens=num_draft_tokens)
    compressor.serve(schedule, recorded(compressor.run), num_tokens=SIZES.max_num_tokens)


@dtypes
@drafts
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"window": 1, "ratio": 8, "head_size": 16},
        {"window": 37, "ratio": 2, "num_heads": 1},
        {"num_heads": 33, "head_size": 40},
    ],
    ids=str,
)
def test_compressed_attention_gives_the_dense_result(
    dtype: torch.dtype, num_draft_tokens: int, change: dict[str, Any]
) -> None:
    attention = CompressedAttention("kernels", dtype, device="cuda", **change)
    attention.serve(random_schedule(LENGTHS, SIZES, seed=1, num_draft_tokens=num_draft_tokens))


@pytest.mark.parametrize(
    ("dtype", "num_heads", "head_size"),
    [
        (torch.bfloat16, 64, 512),
        (torch.float16, 64, 128),
        (torch.bfloat16, 128, 64),
        (torch.float32, 20, 128),
        (torch.float32, 4, 512),
    ],
    ids=str,
)
def test_long_compressed_attention_gives_the_dense_result(dtype: torch.dtype, num_heads: int, head_size: int) -> None:
    attention = CompressedAttention(
        "kernels",
        dtype,
        num_heads=num_heads,
        head_size=head_size,
        window=90,
        lengths=LONG,
        sizes=LARGE,
        device="cuda",
    )
    attention.serve(random_schedule(LONG, LARGE, seed=2))


@dtypes
@drafts
def test_compressed_attention_recorded_on_one_batch_is_right_for_others(
    dtype: torch.dtype, num_draft_tokens: int
) -> None:
    attention = CompressedAttention("kernels", dtype, device="cuda")
    attention.batch.load([INERT], num_tokens=SIZES.max_num_tokens)
    # The runner builds before it records, too: a builder looks at host memory.
    metadata = attention.build()
    run = recorded(lambda: attention.run(metadata))
    schedule = random_schedule(LENGTHS, SIZES, seed=3, num_draft_tokens=num_draft_tokens)
    attention.serve(schedule, run, num_tokens=SIZES.max_num_tokens)


@dtypes
def test_a_recorded_write_of_rows_follows_its_slots(dtype: torch.dtype) -> None:
    num_tokens, block_size, width = 64, 16, 80
    value = torch.randn(num_tokens, 3, width, device="cuda").to(dtype)[:, 1]
    slots = torch.full((num_tokens + 9,), -1, device="cuda")
    cache = torch.randn(40, block_size, width, device="cuda").to(dtype)
    replay = recorded(lambda: write_cache(value, cache, slots))
    for true_tokens in (64, 13, 0):
        value.copy_(torch.randn_like(value))
        expected = cache.clone()
        slots.fill_(-1)
        slots[:true_tokens] = torch.randperm(40 * block_size, device="cuda")[:true_tokens]
        expected.view(-1, width)[slots[:true_tokens]] = value[:true_tokens]
        replay()
        assert torch.equal(cache, expected)


def test_a_gpu_runs_all_three() -> None:
    cuda = torch.device("cuda")
    conv = Conv("kernels", torch.bfloat16, device="cuda").spec
    compressor = Compressor("kernels", torch.bfloat16, device="cuda").spec
    attention = CompressedAttention("kernels", torch.bfloat16, device="cuda").spec
    assert ShortConvBackend.unsupported_reason(conv, cuda) is None
    assert KVCompressorBackend.unsupported_reason(compressor, cuda) is None
    assert CompressedAttentionBackend.unsupported_reason(attention, cuda) is None
