"""The gated delta rule's kernels compiled for a GPU: against the dense oracle, and recorded in real CUDA graphs."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from attention.backends.linear_attention import LinearAttentionBackend, LinearAttentionMetadataBuilder
from tests.attention.linear_oracle import (
    Batch,
    RandomSequence,
    Server,
    Step,
    make_spec,
    serve_in_random_chunks,
    serve_with_rejected_drafts,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def make_server(*, num_tokens: int = 1100, num_reqs: int = 4, **spec: Any) -> Server:
    return Server(Batch(make_spec(**spec), num_tokens=num_tokens, num_reqs=num_reqs, device=CUDA))


def make_sequences(server: Server, *lengths: int, **options: Any) -> list[RandomSequence]:
    spec = server.batch.spec
    return [RandomSequence(spec, n, seed=seed, device=CUDA, **options) for seed, n in enumerate(lengths)]


@dtypes
@pytest.mark.parametrize(
    ("heads", "sizes"),
    [((2, 4), (128, 128)), ((2, 2), (64, 64)), ((1, 3), (80, 48)), ((2, 2), (8, 20))],
    ids=str,
)
@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_sequences_served_in_random_chunks_of_mixed_batches_agree_with_the_dense_rule(
    dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int], num_draft_tokens: int
) -> None:
    server = make_server(heads=heads, sizes=sizes, dtype=dtype, num_draft_tokens=num_draft_tokens)
    assert LinearAttentionBackend.unsupported_reason(server.batch.spec, CUDA) is None
    sequences = make_sequences(server, 200, 131, 350)
    for seed in range(2):
        serve_in_random_chunks(server, sequences, lengths=(1, 3, 4, 5, 33, 64, 65, 130), seed=seed)


@dtypes
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130, 999])
def test_a_prefill_of_any_length_and_the_decode_after_it_agree_with_the_dense_rule(
    dtype: torch.dtype, length: int
) -> None:
    server = make_server(heads=(2, 4), sizes=(128, 128), dtype=dtype)
    (sequence,) = make_sequences(server, length + 1)
    server.serve(None, Step(sequence, 0, length, 3))
    server.serve(Step(sequence, length, 1, 3))


@dtypes
def test_a_thousand_decode_steps_agree_with_the_dense_rule(dtype: torch.dtype) -> None:
    server = make_server(heads=(1, 2), sizes=(64, 64), dtype=dtype, num_tokens=4)
    (sequence,) = make_sequences(server, 1000)
    for position in range(1000):
        server.serve(Step(sequence, position, 1, 0), check=position % 50 == 0 or position > 980)


@dtypes
@pytest.mark.parametrize(
    "options",
    [
        {"log_decay": (0.0,)},
        {"log_decay": (-50.0,)},
        {"log_decay": (-50.0, -0.01)},
        {"log_decay": (-math.inf, 0.0)},
        {"log_decay": (0.0,), "same_keys": True},
    ],
    ids=["none", "strong", "mixed", "infinite", "none, same keys"],
)
def test_no_decay_and_a_strong_one_stay_finite_and_right(dtype: torch.dtype, options: dict[str, Any]) -> None:
    server = make_server(sizes=(64, 64), dtype=dtype)
    (sequence,) = make_sequences(server, 502, **options)
    server.serve(Step(sequence, 0, 500, 0))
    server.serve(Step(sequence, 500, 1, 0))
    server.serve(Step(sequence, 501, 1, 0))


@dtypes
@pytest.mark.parametrize("length", [1, 2, 66], ids="{} tokens".format)
def test_padding_and_a_request_without_a_slot_write_no_state(dtype: torch.dtype, length: int) -> None:
    server = make_server(dtype=dtype, num_draft_tokens=1)
    state = server.batch.recurrent_state
    state.copy_(torch.randn_like(state))
    before = state.clone()
    (sequence,) = make_sequences(server, 70)
    server.serve(None, Step(sequence, 3, length, -1), Step(sequence, 0, 3, 1))
    others = [0, 2, 3, 4]
    assert torch.equal(state[others], before[others])


@dtypes
@pytest.mark.parametrize("prompt", [1, 3, 4, 7, 66], ids="prompt of {}".format)
def test_rejected_drafts_leave_no_trace(dtype: torch.dtype, prompt: int) -> None:
    serve_with_rejected_drafts(make_server(sizes=(64, 64), dtype=dtype, num_draft_tokens=3), prompt=prompt, slot=2)


@dtypes
def test_a_reused_slot_starts_from_zero(dtype: torch.dtype) -> None:
    server = make_server(dtype=dtype, num_draft_tokens=3)
    for length in (1, 4, 5, 70):
        for sequence in make_sequences(server, 76, 76):
            server.serve(Step(sequence, 0, length, 4))
            server.serve(Step(sequence, length, 6, 4))


@dtypes
@pytest.mark.parametrize(
    ("sizes", "num_draft_tokens"), [((128, 128), 0), ((128, 128), 3), ((16, 16), 0), ((16, 16), 3), ((80, 48), 1)]
)
def test_a_graph_recorded_on_one_batch_is_right_for_fifty_others(
    dtype: torch.dtype, sizes: tuple[int, int], num_draft_tokens: int
) -> None:
    most, length = 1 + num_draft_tokens, 60
    server = make_server(
        heads=(2, 4), sizes=sizes, dtype=dtype, num_reqs=8, num_tokens=8 * most, num_draft_tokens=num_draft_tokens
    )
    batch, builder, impl = server.batch, server.builder, server.impl
    sequences = make_sequences(server, *[length] * 5)
    batch.fill([Step(sequences[0], 0, most, 0)])
    common = batch.common(max_query_len=most)
    metadata = builder.build(common, for_capture=True)
    # Compiles the kernel, which a capture must not.
    impl.forward(*batch.inputs, batch.recurrent_state, metadata, batch.out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(*batch.inputs, batch.recurrent_state, metadata, batch.out)

    batch.recurrent_state.fill_(float("nan"))
    rng, served = random.Random(0), [0] * 5
    for _ in range(50):
        steps: list[Step | None] = []
        for slot in rng.sample(range(5), rng.randint(0, 5)):
            if served[slot] + most > length:
                served[slot] = 0  # the slot's next request
            count = rng.randint(1, most)
            steps.append(Step(sequences[slot], served[slot], count, slot))
            served[slot] += count
        batch.fill(steps)
        graph.replay()
        batch.assert_right()


def test_plans_built_faster_than_the_gpu_runs_do_not_overwrite_each_other() -> None:
    spec = make_spec()
    limits = {"max_num_reqs": 4, "max_num_tokens": 1000, "max_model_len": 4096}
    builder = LinearAttentionMetadataBuilder(spec, **limits, device=CUDA)
    on_host = LinearAttentionMetadataBuilder(spec, **limits, device=torch.device("cpu"))
    batch = Batch(spec, num_tokens=1000, num_reqs=4, device=CUDA)
    sequence = RandomSequence(spec, 300)
    commons = []
    for seed in range(10):
        lengths = random.Random(seed).choices(range(1, 240), k=4)
        batch.fill([Step(sequence, 0, length, slot) for slot, length in enumerate(lengths)])
        commons.append(batch.common())
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about a tenth of a second
    seen = []
    for common in commons:
        metadata = builder.build(common, for_capture=False)
        chunks, requests = metadata.chunk_plan[: metadata.num_chunks], metadata.request_plan[: metadata.num_long_reqs]
        seen.append((chunks.clone(), requests.clone()))
    for common, (chunks, requests) in zip(commons, seen, strict=True):
        expected = on_host.build(common, for_capture=False)
        assert torch.equal(chunks.cpu(), expected.chunk_plan[: expected.num_chunks])
        assert torch.equal(requests.cpu(), expected.request_plan[: expected.num_long_reqs])


def test_states_past_two_to_the_31_elements_are_addressed_right() -> None:
    spec = make_spec(heads=(16, 16), sizes=(128, 128))
    num_slots = (1 << 31) // (16 * 128 * 128) + 2
    batch = Batch(spec, num_tokens=80, num_reqs=2, num_slots=num_slots, device=CUDA)
    server = Server(batch)
    (sequence,) = make_sequences(server, 70)
    server.serve(Step(sequence, 0, 1, num_slots - 1), Step(sequence, 0, 66, num_slots - 2))
    server.serve(Step(sequence, 1, 66, num_slots - 1), Step(sequence, 66, 1, num_slots - 2))


def test_a_gpu_runs_layers_of_at_most_128_dimensions() -> None:
    assert "at most 128" in (LinearAttentionBackend.unsupported_reason(make_spec(sizes=(129, 64)), CUDA) or "")
