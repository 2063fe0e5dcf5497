"""Every backend against one plain oracle, on the CPU: Triton's kernels run in its interpreter.

The interpreter must be on before triton is imported; `tests/conftest.py` sees to it where there is no GPU.
"""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from attention.backends.pytorch import TorchAttentionImpl, TorchMetadata
from attention.base import AttentionCGSupport, AttentionImpl, MetadataBuilder
from attention.ops import write_kv_cache as write_kv_cache_op
from attention.registry import choose_backend, get_backend
from attention.specs import AttentionSpec
from tests.attention.oracle import Case, PagedBatch, Requests, grid, random_requests

CPU = torch.device("cpu")
MAX_MODEL_LEN = 256


class MaskedTorchImpl(TorchAttentionImpl):
    """The torch backend as it runs on a GPU: shapes that do not depend on the batch's content."""

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: TorchMetadata, out: torch.Tensor) -> None:
        self._forward_masked(query, kv_cache, metadata, out)


def skip_without_interpreter() -> None:
    triton_backend = pytest.importorskip("attention.backends.triton.backend", exc_type=ImportError)
    if torch.cuda.is_available() and not triton_backend.INTERPRETED:
        pytest.skip("with a GPU the kernels are compiled for it; see tests/gpu/test_backends.py")


def make(name: str, spec: AttentionSpec, batch: PagedBatch) -> tuple[MetadataBuilder[Any], AttentionImpl[Any]]:
    """The builder and the computation of one of: torch, torch masked, triton."""
    if name == "triton":
        skip_without_interpreter()
    backend = get_backend(name.split()[0])
    assert backend.unsupported_reason(spec, batch.device) is None
    builder: Any = backend.get_builder_cls()(
        spec,
        max_num_reqs=batch.num_reqs,
        max_num_tokens=batch.num_tokens,
        max_model_len=batch.max_model_len,
        device=batch.device,
    )
    if name == "triton":
        builder.partial_out.fill_(float("nan"))
        builder.partial_lse.fill_(float("nan"))
    impl_cls = MaskedTorchImpl if name == "torch masked" else backend.get_impl_cls()
    return builder, impl_cls(spec)


def padded_batch(name: str, spec: AttentionSpec, requests: Requests) -> PagedBatch:
    """A batch of `requests`, with room for padding."""
    batch = PagedBatch(
        spec,
        num_tokens=sum(query_len for query_len, _ in requests) + 5,
        num_reqs=len(requests) + 2,
        max_model_len=MAX_MODEL_LEN,
        # The masked path gathers the whole table: past a sequence, too, it must find ids of blocks.
        stale_table=name == "torch masked",
    )
    batch.fill(requests)
    return batch


backends = pytest.mark.parametrize("name", ["torch", "torch masked", "triton"])


@backends
@pytest.mark.parametrize("case", grid(torch.float16), ids=str)
def test_a_backend_agrees_with_dense_attention(name: str, case: Case) -> None:
    batch = padded_batch(name, case.spec, case.lengths)
    builder, impl = make(name, case.spec, batch)
    impl.forward(batch.query, batch.kv_cache, builder.build(batch.common(), for_capture=False), batch.out)
    batch.assert_out_is_right()


SPEC = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    block_size=16,
    dtype=torch.float16,
    scale=0.125,
    sliding_window=90,
)


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
        batch.fill(
            random_requests(
                rng,
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                max_query_len=max_query_len,
                max_model_len=MAX_MODEL_LEN,
            )
        )
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


def test_triton_reads_no_key_that_every_query_of_a_request_has_out_of_its_window() -> None:
    """Blocks that have left the window may have been given to others."""
    batch = padded_batch("triton", SPEC, [(1, 256), (18, 250)])
    builder, impl = make("triton", SPEC, batch)
    for request, (query_len, seq_len) in enumerate([(1, 256), (18, 250)]):
        gone = (seq_len - query_len - 90 + 1) // SPEC.block_size
        assert gone > 0
        batch.kv_cache[batch.block_table[request, :gone].long()] = float("nan")
        batch.block_table[request, :gone] = 1 << 30
    impl.forward(batch.query, batch.kv_cache, builder.build(batch.common(), for_capture=False), batch.out)
    batch.assert_out_is_right()


def test_triton_is_capturable_for_every_batch_and_its_plan_depends_on_sizes_alone() -> None:
    batch = padded_batch("triton", SPEC, [(1, 5), (1, 200)])
    builder, _ = make("triton", SPEC, batch)
    assert builder.get_cudagraph_support() is AttentionCGSupport.ALWAYS
    before = builder.build(batch.common(max_query_len=8), for_capture=True).plan
    batch.fill([(5, 250), (2, 2)])
    assert builder.build(batch.common(max_query_len=8), for_capture=True).plan == before


def test_triton_splits_the_keys_of_small_batches_and_never_past_its_workspace() -> None:
    batch = padded_batch("triton", SPEC, [(1, 200)])
    builder, _ = make("triton", SPEC, batch)
    assert builder.build(batch.common(), for_capture=True).plan.num_splits > 1
    large: Any = type(builder)(
        SPEC, max_num_reqs=64, max_num_tokens=512, max_model_len=MAX_MODEL_LEN, device=batch.device
    )
    for num_reqs in (1, 3, 17, 64):
        for num_tokens in (num_reqs, 100, 512):
            for max_query_len in (1, 4, 33, 512):
                plan = large.plan(
                    num_tokens=num_tokens,
                    num_reqs=num_reqs,
                    max_query_len=max_query_len,
                    max_seq_len=MAX_MODEL_LEN,
                )
                real_tokens = min(num_tokens, num_reqs * max_query_len)
                if plan.num_splits > 1:
                    needed = real_tokens * SPEC.num_heads * plan.num_splits
                    assert needed <= large.partial_lse.shape[0] == large.partial_out.shape[0]
                    assert plan.num_query_blocks * SPEC.num_kv_heads <= len(large.arrivals)
    assert large.plan(num_tokens=64, num_reqs=64, max_query_len=1, max_seq_len=MAX_MODEL_LEN).num_splits == 1


def test_triton_remembers_a_bounded_number_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = padded_batch("triton", SPEC, [(1, 200)])
    builder, _ = make("triton", SPEC, batch)
    monkeypatch.setattr("attention.backends.triton.plan._MAX_PLANS", 3)

    def plan(num_reqs: int, max_seq_len: int = 200) -> Any:
        return builder.plan(num_tokens=num_reqs, num_reqs=num_reqs, max_query_len=1, max_seq_len=max_seq_len)

    assert plan(1) is plan(1) is plan(1, max_seq_len=201)
    assert plan(1) is not plan(2)
    found = [plan(num_reqs) for num_reqs in range(1, 9)]
    assert len(builder._plans) <= 3
    assert [plan(num_reqs) for num_reqs in range(1, 9)] == found


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


def write_with_op(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    write_kv_cache_op(key, value, kv_cache, slot_mapping)


def write_with_triton(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    skip_without_interpreter()
    from attention.backends.triton import write_kv_cache

    write_kv_cache(key, value, kv_cache, slot_mapping)


writers = pytest.mark.parametrize("write", [write_with_op, write_with_triton], ids=["torch", "triton"])


@writers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_size"), [(2, 64), (3, 80), (17, 256)], ids=["2x64", "3x80", "17x256"])
def test_each_token_goes_to_its_slot_and_no_other_byte_of_the_cache_changes(
    write: Any, dtype: torch.dtype, num_kv_heads: int, head_size: int
) -> None:
    num_tokens, width = 5, num_kv_heads * head_size
    # Slices of a fused projection; two tokens have slots of -1, and there are more slots than tokens.
    fused = torch.randn(num_tokens, 64 + 2 * width).to(dtype)
    key = fused[:, 64 : 64 + width].view(num_tokens, num_kv_heads, head_size)
    value = fused[:, 64 + width :].view(num_tokens, num_kv_heads, head_size)
    slots = torch.tensor([17, -1, 0, 79, -1, 33, 34])
    kv_cache = torch.randn(5, 2, 16, num_kv_heads, head_size).to(dtype)
    expected = kv_cache.clone()
    for token, slot in enumerate(slots[:num_tokens].tolist()):
        if slot >= 0:
            expected[slot // 16, 0, slot % 16] = key[token]
            expected[slot // 16, 1, slot % 16] = value[token]
    write(key, value, kv_cache, slots)
    assert torch.equal(kv_cache, expected)


@writers
def test_a_batch_without_tokens_writes_nothing(write: Any) -> None:
    kv_cache = torch.randn(2, 2, 16, 1, 64)
    before = kv_cache.clone()
    write(torch.empty(0, 1, 64), torch.empty(0, 1, 64), kv_cache, torch.tensor([3, 4]))
    assert torch.equal(kv_cache, before)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"block_size": 24}, "block_size must be a power of two of at least 16, got 24"),
        ({"block_size": 8}, "block_size must be a power of two of at least 16, got 8"),
        ({"head_size": 288}, "head_size must be at most 256, got 288"),
        ({"dtype": torch.float64}, "torch.float64"),
        ({"dtype": torch.bfloat16}, "interpreter"),
        ({"num_heads": 512}, "at most 128 query heads may share a KV head, got 256"),
    ],
    ids=str,
)
def test_triton_says_why_it_cannot_run_a_layer(change: dict[str, Any], why: str) -> None:
    skip_without_interpreter()
    reason = get_backend("triton").unsupported_reason(dataclasses.replace(SPEC, **change), CPU)
    assert reason is not None
    assert why in reason


def test_triton_runs_on_no_device_but_cuda_and_an_interpreted_cpu() -> None:
    skip_without_interpreter()
    backend = get_backend("triton")
    assert "not on 'meta'" in (backend.unsupported_reason(SPEC, torch.device("meta")) or "")
    assert "interpreter is on" in (backend.unsupported_reason(SPEC, torch.device("cuda")) or "")


def test_without_the_interpreter_the_triton_backend_is_importable_on_the_cpu_and_says_what_it_needs() -> None:
    pytest.importorskip("triton")
    program = (
        "import torch\n"
        "from attention.backends.triton import TritonBackend\n"
        "from attention.base import AttentionSpec\n"
        "shape = dict(num_heads=4, num_kv_heads=2, head_size=64, block_size=16)\n"
        "spec = AttentionSpec(**shape, dtype=torch.float32, scale=1.0)\n"
        "print(TritonBackend.unsupported_reason(spec, torch.device('cpu')))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "need a CUDA device" in result.stdout
    assert "TRITON_INTERPRET=1" in result.stdout


def test_the_cpu_gets_the_torch_backend_though_the_interpreter_is_on() -> None:
    assert choose_backend(SPEC, CPU).backend is get_backend("torch")


def test_launches_bound_to_their_tensors_follow_the_metadata_of_each_step() -> None:
    batch = padded_batch("triton", SPEC, [(1, 200), (1, 5)])
    builder, impl = make("triton", SPEC, batch)
    run = impl.bind(batch.query, batch.kv_cache, batch.out)
    for requests in ([(1, 200), (1, 5)], [(3, 7)], [(1, 90), (1, 33)]):
        batch.fill(requests)
        run(builder.build(batch.common(), for_capture=False))
        batch.assert_out_is_right()


def test_a_bound_launch_is_prepared_once_for_a_plan_and_anew_for_other_tensors() -> None:
    from attention.backends.triton.bound import BoundLaunches

    launched: list[tuple[object, ...]] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments: launched.append(("again", grid, *arguments))

    class Kernel:
        arg_names = ("x", "n", "SIZE")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def first(*arguments: object, **constants: object) -> Compiled:
                launched.append(("first", grid, len(arguments), *constants))
                return Compiled()

            return first

    @dataclasses.dataclass(frozen=True)
    class Metadata:
        plan: object
        x: torch.Tensor

    plan, x, y = object(), torch.zeros(2), torch.zeros(2)
    run = BoundLaunches(lambda m: [(Kernel(), (3,), (m.x, 7), {"SIZE": 16})], lambda m: (m.x,))
    for tensor in (x, x, y, y):
        run(Metadata(plan, tensor))
    assert [entry[0] for entry in launched] == ["first", "again", "first", "again"]
    assert launched[1] == ("again", (3,), x.data_ptr(), 7, 16)
    assert launched[3] == ("again", (3,), y.data_ptr(), 7, 16)
