"""Compressed attention, served in chunks, against one masked softmax over whole sequences; and its cache's writer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from attention import layers
from attention.backends.compressed_attention import CompressedAttentionBackend, CompressedAttentionMetadata
from attention.base import AttentionCGSupport
from attention.forward_context import ForwardContext, set_forward_context
from attention.ops import write_cache as write_cache_op
from attention.specs import CompressedAttentionSpec
from tests.attention.oracle import TOLERANCE
from tests.attention.serving import (
    LENGTHS,
    SIZES,
    Batch,
    Chunk,
    Schedule,
    Sizes,
    dtypes,
    implementations,
    random_schedule,
    same_bytes,
    skip_without_interpreter,
)
from tests.attention.test_kv_compressor import Compressor, dense_entries


def dense_attention(
    query: torch.Tensor, latents: torch.Tensor, entries: torch.Tensor, *, scale: float, window: int, ratio: int
) -> torch.Tensor:
    """query [n, num_heads, d], latents [n, d], entries [n // ratio, d] -> [n, num_heads, d] fp64: a whole sequence."""
    n, keys = query.shape[0], torch.cat([latents, entries]).double()
    distance = torch.arange(n)[:, None] - torch.arange(n)
    ends = torch.arange(1, len(entries) + 1) * ratio - 1
    visible = torch.cat([(distance >= 0) & (distance < window), ends <= torch.arange(n)[:, None]], dim=1)
    scores = torch.einsum("qhd,kd->qhk", query.double(), keys) * scale
    weights = scores.masked_fill(~visible.to(scores.device)[:, None], float("-inf")).softmax(-1)
    return weights @ keys


class CompressedAttention:
    """A layer, its caches, and the sequences it is served with. Unwritten caches are NaN.

    Latents and entries are independent random rows, put into the caches when their tokens are served.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        *,
        num_heads: int = 3,
        head_size: int = 24,
        window: int = 6,
        ratio: int = 4,
        lengths: Sequence[int] = LENGTHS,
        device: str = "cpu",
        sizes: Sizes = SIZES,
    ) -> None:
        if name == "kernels" and device == "cpu":
            skip_without_interpreter()
        self.name, self.shape = name, {"scale": head_size**-0.5, "window": window, "ratio": ratio}
        self.spec = CompressedAttentionSpec(
            num_heads=num_heads, head_size=head_size, block_size=sizes.block_size, dtype=dtype, **self.shape
        )
        self.builder = CompressedAttentionBackend.get_builder_cls()(
            self.spec,
            max_num_reqs=sizes.max_num_reqs,
            max_num_tokens=sizes.max_num_tokens,
            max_model_len=max(lengths),
            device=torch.device(device),
        )
        # Twice the usual deviation, so that the softmax is not flat and a wrong key shows.
        self.queries = [2 * torch.randn(length, num_heads, head_size).to(device, dtype) for length in lengths]
        self.latents = [torch.randn(length, head_size).to(device, dtype) for length in lengths]
        self.entries = [torch.randn(length // ratio, head_size).to(device, dtype) for length in lengths]
        self.batch = Batch(sizes, device=device)
        rows, per_block = sizes.max_num_tokens + 2, sizes.block_size // ratio
        self.query = torch.empty(rows, num_heads, head_size, dtype=dtype, device=device)
        self.out = torch.empty_like(self.query)
        nan = float("nan")
        self.local = torch.full((sizes.num_blocks, sizes.block_size, head_size), nan, dtype=dtype, device=device)
        self.compressed = torch.full((sizes.num_blocks, per_block, head_size), nan, dtype=dtype, device=device)

    def build(self) -> CompressedAttentionMetadata:
        return self.builder.build(self.batch.common(), for_capture=True)

    def run(self, metadata: CompressedAttentionMetadata | None = None) -> None:
        metadata = metadata or self.build()
        rows = slice(0, self.batch.num_tokens)
        if self.name == "reference" or self.query.is_cuda:
            impl = CompressedAttentionBackend.get_impl_cls()(self.spec)
            impl.forward(self.query[rows], self.local, self.compressed, metadata, self.out[rows])
            return
        from attention.backends.compressed_attention.kernels import compressed_attention

        compressed_attention(self.query[rows], self.local, self.compressed, metadata, self.out[rows], self.spec)

    def write_caches(self, chunk: Chunk) -> None:
        """The chunk's latents and the entries that it completes; before its sequence's first token, NaN everywhere."""
        blocks = list(chunk.blocks)
        if chunk.start == 0:
            self.local[blocks], self.compressed[blocks] = float("nan"), float("nan")
        for position in range(chunk.start, chunk.end):
            block, row = divmod(position, self.local.shape[1])
            self.local[blocks[block], row] = self.latents[chunk.sequence][position]
        for entry in range(chunk.start // self.spec.ratio, chunk.end // self.spec.ratio):
            block, row = divmod(entry, self.compressed.shape[1])
            self.compressed[blocks[block], row] = self.entries[chunk.sequence][entry]

    def poison_rejected(self, chunk: Chunk) -> None:
        """Rejected drafts' latents and entries become NaN: whoever comes back must not look at them."""
        end = chunk.start + chunk.right
        for position in range(end, chunk.end):
            block, row = divmod(position, self.local.shape[1])
            self.local[chunk.blocks[block], row] = float("nan")
        for entry in range(end // self.spec.ratio, chunk.end // self.spec.ratio):
            block, row = divmod(entry, self.compressed.shape[1])
            self.compressed[chunk.blocks[block], row] = float("nan")

    def step(self, run: Callable[[], None] | None = None) -> None:
        """One batch, as loaded: caches and rows of padded tokens must stay as they are."""
        self.batch.gather(self.queries, self.query)
        for chunk in self.batch.chunks:
            self.write_caches(chunk)
        local, compressed = self.local.clone(), self.compressed.clone()
        self.out.fill_(float("nan"))
        (run or self.run)()
        assert self.out[self.batch.starts[-1] :].isnan().all(), "rows of padded tokens were written"
        assert same_bytes(self.local, local)
        assert same_bytes(self.compressed, compressed)

    def serve(self, schedule: Schedule, run: Callable[[], None] | None = None, **padding: int) -> None:
        """Serve every sequence, and compare with the dense attention of each."""
        results = [torch.full_like(query, float("nan")) for query in self.queries]
        for chunks in schedule:
            self.batch.load(chunks, **padding)
            self.step(run)
            self.batch.scatter(self.out, results)
            for chunk in chunks:
                self.poison_rejected(chunk)
        tolerance = TOLERANCE[self.spec.dtype]
        for query, latents, entries, result in zip(self.queries, self.latents, self.entries, results, strict=True):
            expected = dense_attention(query, latents, entries, **self.shape)
            torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@implementations
@dtypes
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"window": 1, "ratio": 8, "head_size": 16},
        # More latents and entries than a program takes at a time.
        {"window": 37, "ratio": 2, "num_heads": 1},
        {"num_heads": 33, "head_size": 40},
    ],
    ids=str,
)
def test_sequences_served_in_chunks_of_mixed_batches_give_the_dense_result(
    name: str, dtype: torch.dtype, change: dict[str, Any]
) -> None:
    CompressedAttention(name, dtype, **change).serve(random_schedule(LENGTHS, SIZES, seed=1))


@implementations
def test_what_rejected_drafts_left_in_the_caches_is_not_seen(name: str) -> None:
    schedule = random_schedule(LENGTHS, SIZES, seed=2, num_draft_tokens=3)
    assert any(chunk.right < chunk.length for chunks in schedule for chunk in chunks)
    CompressedAttention(name, torch.float32).serve(schedule)


@implementations
def test_an_entry_is_seen_by_the_token_that_completes_it_and_by_none_before(name: str) -> None:
    attention = CompressedAttention(name, torch.float32, lengths=[8], window=1)
    attention.serve([[Chunk(sequence=0, start=0, length=8, right=8, slot=0)]])


@implementations
@pytest.mark.parametrize("num_tokens", [0, 4])
def test_a_batch_of_padding_writes_nothing(name: str, num_tokens: int) -> None:
    attention = CompressedAttention(name, torch.float32)
    attention.batch.load([], num_tokens=num_tokens)
    attention.step()


@implementations
def test_a_breakpoint_may_pass_the_real_rows_alone(name: str) -> None:
    attention = CompressedAttention(name, torch.float32, lengths=LENGTHS[3:])

    def run() -> None:
        attention.batch.num_tokens = attention.batch.starts[-1]
        attention.run()

    attention.serve(random_schedule(LENGTHS[3:], SIZES, seed=3), run)


@implementations
@dtypes
def test_strided_queries_caches_and_outputs_are_read_and_written_in_place(name: str, dtype: torch.dtype) -> None:
    attention = CompressedAttention(name, dtype, lengths=LENGTHS[3:])
    rows, heads, dim = attention.query.shape
    fused = torch.full((rows, (heads + 2) * dim), float("nan"), dtype=dtype)
    attention.query = fused[:, dim : (heads + 1) * dim].view(rows, heads, dim)
    wide = torch.full((rows, heads, 2, dim), float("nan"), dtype=dtype)
    attention.out = wide[:, :, 1]
    for cache in ("local", "compressed"):
        shape = getattr(attention, cache).shape
        setattr(attention, cache, torch.full((*shape[:2], 2 * dim), float("nan"), dtype=dtype)[..., dim:])
    attention.serve(random_schedule(LENGTHS[3:], SIZES, seed=3))
    assert wide[:, :, 0].isnan().all()


@torch.no_grad()
def test_a_layer_gives_the_dense_result_of_its_own_latents_and_entries() -> None:
    """The write of latents, the compressor and the attention, as a model calls them."""
    attention, compressor = CompressedAttention("reference", torch.float32), Compressor("reference", torch.float32)
    layer = layers.CompressedAttention(3, 24, window=6, ratio=4)
    layer.compressor.load_state_dict({"weight": compressor.weight})
    batch, caches = attention.batch, {"window_state": compressor.state, "compressed_cache": compressor.cache}
    layer.compressor.bind("layer.compressor", {**caches, **batch.tensors})
    layer.bind("layer", {"local_cache": attention.local, **batch.tensors})
    inputs = [[query.flatten(1) for query in attention.queries], attention.latents, compressor.kv, compressor.score]
    rows = [torch.empty(SIZES.max_num_tokens + 2, sequences[0].shape[1]) for sequences in inputs]
    results = [torch.full_like(query, float("nan")) for query in inputs[0]]
    impl = CompressedAttentionBackend.get_impl_cls()(attention.spec)
    for chunks in random_schedule(LENGTHS, SIZES, seed=6):
        batch.load(chunks)
        for sequences, into in zip(inputs, rows, strict=True):
            batch.gather(sequences, into)
        context = ForwardContext(impls={"layer": impl}, metadata={"layer": attention.build()})
        with set_forward_context(context):
            batch.scatter(layer(*(row[: batch.num_tokens] for row in rows)), results)
    for index, result in enumerate(results):
        kv, score = compressor.kv[index], compressor.score[index]
        entries = dense_entries(kv, score, compressor.weight, ratio=4, eps=1e-6)
        expected = dense_attention(attention.queries[index], attention.latents[index], entries, **attention.shape)
        torch.testing.assert_close(result.double(), expected.flatten(1), atol=2e-5, rtol=2e-5)


def test_the_kernel_says_which_tensor_has_a_strided_last_dimension() -> None:
    attention = CompressedAttention("kernels", torch.float32)
    attention.batch.load([])
    attention.out = attention.out.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match=r"contiguous last dimensions.*'out'"):
        attention.run()


SPEC = CompressedAttentionSpec(
    num_heads=3, head_size=24, scale=1.0, window=6, ratio=4, block_size=8, dtype=torch.float32
)


def test_the_backend_hands_the_runners_buffers_on_and_is_recordable_for_every_batch() -> None:
    attention = CompressedAttention("reference", torch.float32)
    attention.batch.load([Chunk(sequence=0, start=0, length=3, right=3, slot=0)])
    common = attention.batch.common()
    metadata = attention.builder.build(common, for_capture=True)
    assert all(getattr(metadata, f.name) is getattr(common, f.name) for f in dataclasses.fields(metadata))
    assert attention.builder.get_cudagraph_support() is AttentionCGSupport.ALWAYS


def test_the_backend_runs_on_the_cpu_and_says_why_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = CompressedAttentionBackend.unsupported_reason
    large, double = dataclasses.replace(SPEC, head_size=513), dataclasses.replace(SPEC, dtype=torch.float64)
    assert [reason(spec, torch.device("cpu")) for spec in (SPEC, large, double)] == [None] * 3
    assert "not on 'meta'" in (reason(SPEC, torch.device("meta")) or "")
    skip_without_interpreter()
    assert "interpreter is on" in (reason(SPEC, torch.device("cuda")) or "")
    monkeypatch.setattr("attention.backends.triton.backend.INTERPRETED", False)
    assert reason(SPEC, torch.device("cuda")) is None
    assert "head_size must be at most 512, got 513" in (reason(large, torch.device("cuda")) or "")
    assert "torch.float64" in (reason(double, torch.device("cuda")) or "")


def write_with_triton(value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    skip_without_interpreter()
    from attention.backends.triton.write import write_cache

    write_cache(value, cache, slot_mapping)


writers = pytest.mark.parametrize("write", [write_cache_op, write_with_triton], ids=["torch", "triton"])


@writers
@dtypes
@pytest.mark.parametrize("shape", [(24,), (3, 5), (2100,)], ids=str)
def test_each_row_goes_to_its_slot_and_no_other_byte_of_the_cache_changes(
    write: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    # Slices of something wider; two tokens have slots of -1, and there are more slots than tokens.
    value = torch.randn(5, 3, *shape).to(dtype)[:, 1]
    slots = torch.tensor([17, -1, 0, 23, -1, 5, 6])
    wide = torch.randn(3, 2, 8, *shape).to(dtype)
    expected = wide.clone()
    for token, slot in enumerate(slots[:5].tolist()):
        if slot >= 0:
            expected[slot // 8, 1, slot % 8] = value[token]
    write(value, wide[:, 1], slots)
    assert torch.equal(wide, expected)


@writers
def test_a_write_of_no_tokens_changes_nothing(write: Any) -> None:
    cache = torch.randn(2, 8, 4)
    before = cache.clone()
    write(torch.empty(0, 4), cache, torch.tensor([3, 4]))
    assert torch.equal(cache, before)
