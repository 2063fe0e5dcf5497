"""The gated delta rule against a dense oracle: the reference, and on the CPU the kernels in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from attention.backends.linear_attention import LinearAttentionBackend, LinearAttentionMetadataBuilder
from attention.base import AttentionCGSupport, UncapturableMetadata
from tests.attention.linear_oracle import (
    Batch,
    Compute,
    RandomSequence,
    Server,
    Step,
    make_spec,
    serve_in_random_chunks,
    serve_with_rejected_drafts,
    with_forward,
    with_kernels,
)

CPU = torch.device("cpu")


@pytest.fixture(params=["reference", "kernels"])
def compute(request: pytest.FixtureRequest) -> Compute:
    """How to run one step on CPU tensors."""
    if request.param == "reference":
        return with_forward
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("with a GPU the kernels are compiled for it; see tests/gpu/test_linear_attention.py")
    return with_kernels


def make_server(compute: Compute, *, num_tokens: int = 140, num_reqs: int = 3, **spec: Any) -> Server:
    return Server(Batch(make_spec(**spec), num_tokens=num_tokens, num_reqs=num_reqs), compute)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130])
def test_a_prefill_of_a_length_around_the_chunk_size_agrees_with_the_dense_rule(compute: Compute, length: int) -> None:
    server = make_server(compute)
    sequence = RandomSequence(server.batch.spec, length)
    server.serve(None, Step(sequence, 0, length, 3))


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_sequences_served_in_random_chunks_of_mixed_batches_agree_with_the_dense_rule(
    compute: Compute, num_draft_tokens: int, seed: int
) -> None:
    server = make_server(compute, heads=(1, 2), num_tokens=300, num_reqs=4, num_draft_tokens=num_draft_tokens)
    sequences = [RandomSequence(server.batch.spec, length, seed=length) for length in (90, 31, 133)]
    serve_in_random_chunks(server, sequences, lengths=(1, 2, 4, 5, 33, 64, 70), seed=seed)


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [((1, 1), (16, 80)), ((2, 4), (24, 40)), ((1, 3), (130, 16)), ((3, 3), (8, 4)), ((2, 2), (64, 100))],
    ids=str,
)
def test_any_heads_and_sizes_agree_with_the_dense_rule(
    compute: Compute, heads: tuple[int, int], sizes: tuple[int, int]
) -> None:
    server = make_server(compute, heads=heads, sizes=sizes, num_draft_tokens=1)
    sequence = RandomSequence(server.batch.spec, 75)
    for start, end in ((0, 70), (70, 71), (71, 73), (73, 75)):
        server.serve(Step(sequence, start, end - start, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_agrees_with_the_dense_rule(compute: Compute, dtype: torch.dtype) -> None:
    server = make_server(compute, dtype=dtype)
    sequence = RandomSequence(server.batch.spec, 70)
    server.serve(Step(sequence, 0, 68, 0))
    server.serve(Step(sequence, 68, 1, 0))


@pytest.mark.parametrize(
    "log_decay", [(0.0,), (-50.0,), (-50.0, -0.01), (-math.inf, 0.0)], ids=["none", "strong", "mixed", "infinite"]
)
def test_no_decay_and_a_strong_one_stay_finite_and_right(compute: Compute, log_decay: tuple[float, ...]) -> None:
    server = make_server(compute)
    sequence = RandomSequence(server.batch.spec, 134, log_decay=log_decay)
    server.serve(Step(sequence, 0, 132, 0))
    server.serve(Step(sequence, 132, 1, 0))
    server.serve(Step(sequence, 133, 1, 0))


def test_tokens_with_the_same_key_and_no_decay_agree_with_the_dense_rule(compute: Compute) -> None:
    """The triangular system is then as full as it gets; powers of its matrix grow as binomials do."""
    server = make_server(compute)
    server.serve(Step(RandomSequence(server.batch.spec, 130, log_decay=(0.0,), same_keys=True), 0, 130, 0))


def test_padded_requests_and_tokens_change_no_state(compute: Compute) -> None:
    server = make_server(compute, num_tokens=90, num_reqs=5)
    state = server.batch.recurrent_state
    state.copy_(torch.randn_like(state))
    before = state.clone()
    sequence = RandomSequence(server.batch.spec, 80)
    # Slots 1 and 3 belong to no request, and slots 0 and 2 must not take padding's NaN.
    server.serve(None, Step(sequence, 0, 70, 2), None, Step(sequence, 0, 1, 0))
    assert torch.equal(state[[1, 3, 4]], before[[1, 3, 4]])
    server.serve(Step(sequence, 70, 10, 2), Step(sequence, 1, 1, 0))
    assert torch.equal(state[[1, 3, 4]], before[[1, 3, 4]])


@pytest.mark.parametrize("length", [1, 2, 66], ids="{} tokens".format)
def test_a_request_without_a_slot_writes_no_state(compute: Compute, length: int) -> None:
    server = make_server(compute, num_draft_tokens=1)
    state = server.batch.recurrent_state
    state.copy_(torch.randn_like(state))
    before = state.clone()
    sequence = RandomSequence(server.batch.spec, 70)
    server.serve(Step(sequence, 3, length, -1), Step(sequence, 0, 3, 1))
    others = [0, 2, 3, 4]
    assert torch.equal(state[others], before[others])


@pytest.mark.parametrize("prompt", [1, 3, 4, 7, 66], ids="prompt of {}".format)
def test_rejected_drafts_leave_no_trace(compute: Compute, prompt: int) -> None:
    serve_with_rejected_drafts(make_server(compute, num_draft_tokens=3), prompt=prompt, slot=2)


@pytest.mark.parametrize("length", [1, 4, 5], ids="{} tokens".format)
def test_a_reused_slot_starts_from_zero(compute: Compute, length: int) -> None:
    server = make_server(compute, num_draft_tokens=3)
    for seed in (0, 1):
        sequence = RandomSequence(server.batch.spec, 11, seed=seed)
        server.serve(Step(sequence, 0, length, 4))
        server.serve(Step(sequence, length, 6, 4))


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_what_is_recorded_over_one_batch_is_right_for_others_in_the_same_buffers(
    compute: Compute, num_draft_tokens: int
) -> None:
    server = make_server(compute, num_tokens=20, num_reqs=4, num_draft_tokens=num_draft_tokens)
    batch, most = server.batch, 1 + num_draft_tokens
    a, b, c = (RandomSequence(batch.spec, 30, seed=seed) for seed in range(3))
    for slot, sequence in enumerate((a, b, c)):
        server.serve(Step(sequence, 0, 9, slot))
    batch.fill([])
    metadata = server.builder.build(batch.common(max_query_len=most), for_capture=True)
    for steps in (
        [Step(a, 9, most, 0), Step(b, 9, 1, 1)],
        [Step(c, 9, most, 2), None, Step(b, 10, most, 1)],
        [None, Step(a, 9 + most, 1, 0)],
        [],
        [Step(a, 10 + most, most, 0), Step(b, 10 + most, most, 1), Step(c, 9 + most, most, 2), Step(b, 0, most, 4)],
    ):
        batch.fill(steps)
        server.compute(server.impl, batch, metadata)
        batch.assert_right()


def test_a_bound_of_long_requests_holds_for_a_batch_that_has_none(compute: Compute) -> None:
    server = make_server(compute)
    server.serve(Step(RandomSequence(server.batch.spec, 1), 0, 1, 0), max_query_len=64)
    server.serve(max_query_len=64)


def facts(metadata: Any) -> dict[str, Any]:
    """Addresses and sizes of tensors, and everything else as it is."""
    values = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(metadata)}
    return {n: (v.data_ptr(), v.shape) if isinstance(v, torch.Tensor) else v for n, v in values.items()}


def test_addresses_and_numbers_are_those_of_every_build_of_the_same_padded_sizes() -> None:
    server = make_server(with_forward, num_draft_tokens=3)
    batch, builder = server.batch, server.builder
    sequence = RandomSequence(batch.spec, 140)
    batch.fill([])
    recorded = facts(builder.build(batch.common(max_query_len=4), for_capture=True))
    server.serve(Step(sequence, 0, 100, 0), Step(sequence, 0, 2, 1))
    batch.fill([Step(sequence, 100, 4, 0), None, Step(sequence, 2, 1, 1)])
    for for_capture in (True, False):
        assert facts(builder.build(batch.common(max_query_len=4), for_capture=for_capture)) == recorded


def test_the_plan_cuts_long_requests_alone_into_chunks() -> None:
    server = make_server(with_forward, num_tokens=300, num_reqs=5, num_draft_tokens=1)
    sequence = RandomSequence(server.batch.spec, 130)
    server.batch.fill([Step(sequence, 0, n, slot) for slot, n in enumerate((2, 130, 1, 64, 3))])
    metadata = server.builder.build(server.batch.common(), for_capture=False)
    assert metadata.chunk_plan[: metadata.num_chunks].tolist() == [
        [2, 66],
        [66, 130],
        [130, 132],
        [133, 197],
        [197, 200],
    ]
    assert metadata.request_plan[: metadata.num_long_reqs].tolist() == [[1, 0], [3, 3], [4, 4]]


def test_the_plan_has_room_for_the_most_chunks_that_a_batch_can_have() -> None:
    server = make_server(with_forward, num_tokens=200, num_reqs=3)
    sequence = RandomSequence(server.batch.spec, 130)
    server.batch.fill([Step(sequence, 0, n, slot) for slot, n in enumerate((129, 65, 6))])
    metadata = server.builder.build(server.batch.common(), for_capture=False)
    assert metadata.num_chunks == 3 + 2 + 1 <= len(metadata.chunk_plan)


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_metadata_can_be_recorded_for_as_many_tokens_a_request_as_it_has_states_and_no_more(
    num_draft_tokens: int,
) -> None:
    server = make_server(with_forward, num_draft_tokens=num_draft_tokens)
    assert server.builder.get_cudagraph_support() is AttentionCGSupport.UNIFORM_BATCH
    sequence = RandomSequence(server.batch.spec, 10)
    for length in range(1, 2 + num_draft_tokens):
        server.batch.fill([Step(sequence, 0, length, 0), Step(sequence, 0, length, 1)])
        server.builder.build(server.batch.common(), for_capture=True)
    server.batch.fill([Step(sequence, 0, 2 + num_draft_tokens, 0)])
    with pytest.raises(UncapturableMetadata, match=f"up to {2 + num_draft_tokens} query tokens.* only the host knows"):
        server.builder.build(server.batch.common(), for_capture=True)


def test_the_kernels_say_which_tensor_is_not_contiguous() -> None:
    pytest.importorskip("triton")
    server = make_server(with_kernels)
    batch = server.batch
    query, key, *others = batch.inputs
    batch.inputs = (query, key.transpose(1, 2).contiguous().transpose(1, 2), *others)
    with pytest.raises(ValueError, match="key's last dimension contiguous"):
        server.serve(Step(RandomSequence(batch.spec, 1), 0, 1, 0))


def test_the_backend_says_what_it_cannot_run() -> None:
    spec, cuda = make_spec(), torch.device("cuda")
    assert LinearAttentionBackend.unsupported_reason(spec, CPU) is None
    assert "not on 'meta'" in (LinearAttentionBackend.unsupported_reason(spec, torch.device("meta")) or "")
    assert LinearAttentionBackend.get_builder_cls() is LinearAttentionMetadataBuilder
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        assert "interpreter is on" in (LinearAttentionBackend.unsupported_reason(spec, cuda) or "")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (make_spec(sizes=(129, 16)), "at most 128 on CUDA, got head_k_size 129 and head_v_size 16"),
        (make_spec(sizes=(16, 300)), "head_v_size 300"),
        (make_spec(dtype=torch.float64), "torch.float64"),
    ],
    ids=["key size", "value size", "dtype"],
)
def test_the_backend_says_which_layers_its_kernels_cannot_run(
    spec: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LinearAttentionBackend.unsupported_reason(spec, CPU) is None
    monkeypatch.setattr("attention.backends.linear_attention.backend.unsupported_device", lambda device: None)
    assert why in (LinearAttentionBackend.unsupported_reason(spec, torch.device("cuda")) or "")
