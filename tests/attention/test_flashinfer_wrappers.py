"""The FlashInfer backend's calls of the library, whose wrappers are played by doubles on the CPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from attention.backends.flashinfer import FlashInferBackend
from piecewise_backend.cudagraph.fingerprint import Fingerprint
from tests.attention.flashinfer_doubles import use_doubles
from tests.attention.oracle import TOLERANCE, Case, PagedBatch


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_doubles(monkeypatch)


def make_for(batch: PagedBatch) -> tuple[Any, Any]:
    builder = FlashInferBackend.get_builder_cls()(batch.spec, **batch.limits)
    return builder, FlashInferBackend.get_impl_cls()(batch.spec)


def assert_true_rows_are_right(batch: PagedBatch) -> None:
    true, tolerance = len(batch.expected), TOLERANCE[batch.spec.dtype]
    torch.testing.assert_close(batch.out[:true].double(), batch.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("for_capture", [False, True], ids=["plain", "for capture"])
@pytest.mark.parametrize(
    "case",
    [
        Case((8, 2), 64, 16, torch.bfloat16, "prefill"),
        Case((4, 4), 128, 32, torch.bfloat16, "chunked", 70, 3.0),
        Case((8, 2), 64, 16, torch.bfloat16, "speculative", 3),
        Case((4, 1), 64, 16, torch.bfloat16, "mixed", 1),
        Case((8, 2), 64, 16, torch.bfloat16, "decode"),
        Case((9, 3), 64, 16, torch.bfloat16, "decode", 33, 3.0),
    ],
    ids=str,
)
def test_the_library_is_asked_for_what_the_oracle_computes(case: Case, for_capture: bool) -> None:
    batch = PagedBatch.padded(case.spec, case.lengths, max_model_len=256)
    builder, impl = make_for(batch)
    for _ in range(2):
        metadata = builder.build(batch.common(), for_capture=for_capture)
        impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
        assert_true_rows_are_right(batch)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "max_query_len"),
    [(6, 6, 1), (24, 6, 4), (40, 5, 40)],
    ids=["decode", "speculative", "mixed"],
)
def test_what_was_recorded_for_one_batch_is_right_for_others(
    num_tokens: int, num_reqs: int, max_query_len: int
) -> None:
    spec = Case((8, 2), 64, 16, torch.bfloat16, "decode", 50).spec
    batch = PagedBatch(spec, num_tokens=num_tokens, num_reqs=num_reqs, max_model_len=128)
    batch.fill([(num_tokens // num_reqs, 128)] * num_reqs)
    builder, impl = make_for(batch)
    bounds = {"max_query_len": max_query_len, "max_seq_len": 128}
    recorded = builder.build(batch.common(**bounds), for_capture=True)
    impl.forward(batch.query, batch.kv_cache, recorded, batch.out)
    fingerprint = Fingerprint.take(recorded, layer="a", backend="flashinfer", unrecorded=builder.unrecorded_fields)
    rng = random.Random(0)
    for _ in range(5):
        batch.fill_at_random(rng, max_query_len=max_query_len)
        fingerprint.check(builder.build(batch.common(**bounds), for_capture=False))
        recorded.wrapper._library.replay()
        assert_true_rows_are_right(batch)


@pytest.mark.usefixtures("doubles")
def test_a_result_that_is_not_contiguous_is_refused() -> None:
    batch = PagedBatch(Case((8, 2), 64, 16, torch.bfloat16, "mixed").spec, num_tokens=4, num_reqs=2, max_model_len=32)
    batch.fill([(2, 2), (2, 20)])
    builder, impl = make_for(batch)
    metadata = builder.build(batch.common(), for_capture=False)
    with pytest.raises(ValueError, match="a contiguous result"):
        impl.forward(batch.query, batch.kv_cache, metadata, batch.out.transpose(0, 1).contiguous().transpose(0, 1))
