"""The FlashInfer backend: against the oracle, and in recorded graphs.

FlashInfer compiles a module for each head size and variant, for about a minute each: variants come in few shapes.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from attention.backends.flashinfer import FlashInferMetadata, FlashInferMetadataBuilder
from attention.base import AttentionImpl, UncapturableMetadata
from attention.registry import choose_backend, get_backend
from attention.specs import AttentionSpec
from piecewise_backend.cudagraph.fingerprint import Fingerprint, StaleMetadata
from tests.attention.oracle import TOLERANCE, Case, PagedBatch, Requests

pytest.importorskip("flashinfer")
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LARGE = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, block_size=16, dtype=torch.bfloat16, scale=128**-0.5)
CUDA_CORES = {"num_heads": 16}
"""Two query heads a KV head: decode runs the other kernel."""


def make(
    spec: AttentionSpec, *, num_tokens: int, num_reqs: int, max_model_len: int
) -> tuple[FlashInferMetadataBuilder, AttentionImpl[FlashInferMetadata]]:
    backend: Any = get_backend("flashinfer")
    builder = backend.get_builder_cls()(
        spec, max_num_reqs=num_reqs, max_num_tokens=num_tokens, max_model_len=max_model_len, device=CUDA
    )
    return builder, backend.get_impl_cls()(spec)


def make_for(batch: PagedBatch) -> tuple[FlashInferMetadataBuilder, AttentionImpl[FlashInferMetadata]]:
    return make(batch.spec, num_tokens=batch.num_tokens, num_reqs=batch.num_reqs, max_model_len=batch.max_model_len)


def padded_batch(spec: AttentionSpec, requests: Requests, *, max_model_len: int, seed: int = 0) -> PagedBatch:
    return PagedBatch.padded(spec, requests, max_model_len=max_model_len, device=CUDA, seed=seed)


def assert_out_is_right(batch: PagedBatch, *, is_decode: bool) -> None:
    """As the oracle's own, but that in decode rows of padded requests hold anything."""
    true = len(batch.expected)
    tolerance = TOLERANCE[batch.spec.dtype]
    torch.testing.assert_close(batch.out[:true].double(), batch.expected, atol=tolerance, rtol=tolerance)
    untouched = batch.out[batch.num_reqs if is_decode else true :]
    assert untouched.isnan().all(), "rows past the batch were written"


def test_a_gpu_may_have_it_and_gets_triton_unless_asked() -> None:
    assert choose_backend(LARGE, CUDA).backend.name == "triton"
    assert choose_backend(LARGE, CUDA, forced="flashinfer").backend.name == "flashinfer"


BF16 = torch.bfloat16
CASES = [
    Case((8, 2), 128, 16, BF16, "prefill"),
    Case((8, 2), 128, 16, BF16, "chunked"),
    Case((9, 3), 128, 16, BF16, "one chunk"),
    Case((8, 2), 128, 16, BF16, "speculative"),
    Case((4, 4), 128, 16, BF16, "mixed"),
    Case((8, 2), 128, 64, BF16, "mixed"),
    Case((8, 2), 128, 16, BF16, "decode"),
    Case((12, 2), 128, 16, BF16, "decode"),
    Case((4, 4), 128, 16, BF16, "decode"),
    Case((9, 3), 128, 32, BF16, "decode"),
    Case((4, 1), 64, 16, BF16, "mixed"),
    Case((8, 2), 64, 32, BF16, "decode"),
    # One module for prefill and decode on tensor cores, one for the other decode.
    Case((8, 2), 128, 16, BF16, "chunked", 50, 3.0),
    Case((8, 2), 128, 16, BF16, "mixed", 1, 3.0),
    Case((8, 2), 128, 16, BF16, "decode", 33, 3.0),
    Case((4, 4), 128, 16, BF16, "decode", 33, 3.0),
]


@pytest.mark.parametrize("for_capture", [False, True], ids=["plain", "for capture"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_backend_agrees_with_dense_attention(case: Case, for_capture: bool) -> None:
    batch = padded_batch(case.spec, case.lengths, max_model_len=256)
    builder, impl = make_for(batch)
    metadata = builder.build(batch.common(), for_capture=for_capture)
    impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
    assert_out_is_right(batch, is_decode=case.requests == "decode")


@pytest.mark.parametrize("change", [{}, CUDA_CORES], ids=str)
@pytest.mark.parametrize("for_capture", [False, True], ids=["plain", "for capture"])
@pytest.mark.parametrize(
    "requests",
    [
        [(1, 4000), (1, 1), (1, 2049), (1, 33)],
        [(4, 4000), (4, 4), (4, 1025)],
        [(700, 700), (1, 3000), (130, 2500), (1, 64), (257, 512)],
    ],
    ids=["decode", "speculative", "mixed"],
)
def test_long_sequences_agree_with_dense_attention(
    change: dict[str, Any], requests: list[tuple[int, int]], for_capture: bool
) -> None:
    batch = padded_batch(dataclasses.replace(LARGE, **change), requests, max_model_len=4096)
    builder, impl = make_for(batch)
    metadata = builder.build(batch.common(), for_capture=for_capture)
    impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
    assert_out_is_right(batch, is_decode=requests[0][0] == 1)


@pytest.mark.parametrize("change", [{}, CUDA_CORES], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "max_query_len"),
    [(1, 1, 1), (16, 16, 1), (300, 300, 1), (32, 8, 4), (40, 2, 40), (256, 8, 256), (64, 64, 64)],
    ids=["one decode", "decodes", "many decodes", "speculative", "small mixed", "mixed", "many small"],
)
def test_a_graph_recorded_on_one_batch_is_right_for_ten_others(
    change: dict[str, Any], num_tokens: int, num_reqs: int, max_query_len: int
) -> None:
    batch = PagedBatch(
        dataclasses.replace(LARGE, **change),
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        max_model_len=512,
        device=CUDA,
    )
    batch.fill([(1, 1)] * num_reqs)
    builder, impl = make_for(batch)
    common = batch.common(max_query_len=max_query_len, max_seq_len=512)
    # Compiles and loads the kernels, which a capture must not.
    impl.forward(batch.query, batch.kv_cache, builder.build(common, for_capture=True), batch.out)
    recorded = builder.build(common, for_capture=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(batch.query, batch.kv_cache, recorded, batch.out)
    fingerprint = Fingerprint.take(recorded, layer="a", backend="flashinfer", unrecorded=builder.unrecorded_fields)

    rng = random.Random(0)
    for _ in range(10):
        batch.fill_at_random(rng, max_query_len=max_query_len)
        common = batch.common(max_query_len=max_query_len, max_seq_len=512)
        fingerprint.check(builder.build(common, for_capture=False))
        graph.replay()
        assert_out_is_right(batch, is_decode=max_query_len == 1)


def test_metadata_of_other_sizes_does_not_pass_for_recorded_metadata() -> None:
    batch = padded_batch(LARGE, [(4, 40), (7, 7)], max_model_len=256)
    builder, _ = make_for(batch)
    recorded = builder.build(batch.common(), for_capture=True)
    fingerprint = Fingerprint.take(recorded, layer="a", backend="flashinfer", unrecorded=builder.unrecorded_fields)
    other = dataclasses.replace(batch.common(), num_tokens=batch.num_tokens - 1)
    with pytest.raises(StaleMetadata, match="'wrapper' of layer 'a'"):
        fingerprint.check(builder.build(other, for_capture=False))


@pytest.mark.parametrize("requests", [[(1, 40), (1, 7)], [(4, 40), (7, 7)]], ids=["decode", "mixed"])
def test_a_batch_is_planned_once_for_all_layers(
    requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = padded_batch(LARGE, requests, max_model_len=256)
    builder, impl = make_for(batch)
    library = builder.build(batch.common(), for_capture=False).wrapper._library
    plans: list[int] = []
    plan = library.plan

    def counted(*args: Any, **kwargs: Any) -> None:
        plans.append(1)
        plan(*args, **kwargs)

    monkeypatch.setattr(library, "plan", counted)
    metadata = builder.build(batch.common(), for_capture=False)
    for _ in range(3):
        impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
    assert len(plans) == 1
    assert_out_is_right(batch, is_decode=requests[0][0] == 1)


@pytest.mark.parametrize("change", [{}, CUDA_CORES], ids=str)
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize("for_capture", [False, True], ids=["plain", "for capture"])
def test_a_step_may_be_planned_while_the_device_has_the_last_one_before_it(
    change: dict[str, Any], decode: bool, for_capture: bool
) -> None:
    """The host runs ahead: the copies of one plan wait behind a long kernel while the next is made."""
    spec = dataclasses.replace(LARGE, **change)
    lengths = [
        [(1, 200), (1, 3), (1, 90)] if decode else [(9, 200), (60, 60), (2, 90)],
        [(1, 17), (1, 250), (1, 31)] if decode else [(50, 51), (1, 250), (20, 31)],
    ]
    batches = [padded_batch(spec, requests, max_model_len=256, seed=seed) for seed, requests in enumerate(lengths)]
    commons = [batch.common() for batch in batches]
    builder, impl = make(spec, num_tokens=100, num_reqs=5, max_model_len=256)
    for common, batch in zip(commons, batches, strict=True):
        metadata = builder.build(common, for_capture=for_capture)
        impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
        batch.out.fill_(float("nan"))
    torch.cuda._sleep(200_000_000)
    for common, batch in zip(commons, batches, strict=True):
        metadata = builder.build(common, for_capture=for_capture)
        impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
    for batch in batches:
        assert_out_is_right(batch, is_decode=decode)


def test_a_recording_that_needs_more_than_the_usual_workspace_gets_it() -> None:
    requests = [(2, 60)] * 200
    batch = padded_batch(LARGE, requests, max_model_len=64)
    builder, impl = make_for(batch)
    metadata = builder.build(batch.common(), for_capture=True)
    impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
    assert_out_is_right(batch, is_decode=False)


def test_a_recording_that_needs_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention.backends.flashinfer.backend._MAX_WORKSPACE_BYTES", 1 << 20)
    batch = padded_batch(LARGE, [(4, 40), (7, 7)], max_model_len=256)
    builder, impl = make_for(batch)
    with pytest.raises(UncapturableMetadata, match=r"a workspace of \d+ MiB for 16 tokens of 4 requests"):
        builder.build(batch.common(), for_capture=True)
    impl.forward(batch.query, batch.kv_cache, builder.build(batch.common(), for_capture=False), batch.out)
    assert_out_is_right(batch, is_decode=False)
