"""The KV compressor, served in chunks, against windows of whole sequences."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from attention.specs import KVCompressorSpec
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
    poisoned_memory,
    random_schedule,
    same_bytes,
    skip_without_interpreter,
)


def dense_entries(
    kv: torch.Tensor, score: torch.Tensor, weight: torch.Tensor, *, ratio: int, eps: float
) -> torch.Tensor:
    """kv, score [n, dim] -> [n // ratio, dim] fp64: the entries of one sequence, whole."""
    if kv.shape[0] < ratio:
        return kv.new_empty(0, kv.shape[1]).double()
    values, scores = kv.double().unfold(0, ratio, ratio), score.double().unfold(0, ratio, ratio)
    mixed = (scores.softmax(-1) * values).sum(-1)
    return mixed / (mixed.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


class Compressor:
    """A layer, its caches, and the sequences it is served with. Unwritten caches are NaN."""

    eps = 1e-3

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        *,
        dim: int = 24,
        ratio: int = 4,
        num_draft_tokens: int = 0,
        score_dim: int | None = None,
        lengths: Sequence[int] = LENGTHS,
        device: str = "cpu",
        sizes: Sizes = SIZES,
    ) -> None:
        if name == "kernels" and device == "cpu":
            skip_without_interpreter()
        self.operator = importlib.import_module(f"attention.backends.kv_compressor.{name}").compress_kv
        self.spec = KVCompressorSpec(
            dim=dim, ratio=ratio, num_draft_tokens=num_draft_tokens, block_size=sizes.block_size, dtype=dtype
        )
        self.ratio = ratio
        self.weight = (1 + torch.randn(dim) / 4).to(device, dtype)
        self.kv = [torch.randn(length, dim).to(device, dtype) for length in lengths]
        # Twice the usual deviation, so that the softmax is not flat and a wrong score shows.
        self.score = [2 * torch.randn(length, score_dim or dim).to(device, dtype) for length in lengths]
        self.batch = Batch(sizes, device=device)
        self.kv_rows = torch.empty(sizes.max_num_tokens + 2, dim, dtype=dtype, device=device)
        self.score_rows = torch.empty(sizes.max_num_tokens + 2, score_dim or dim, dtype=dtype, device=device)
        caches = self.spec.caches()
        window, compressed = caches["window_state"], caches["compressed_cache"]
        nan = float("nan")
        self.state = torch.full((sizes.num_slots, *window.shape), nan, dtype=window.dtype, device=device)
        self.cache = torch.full((sizes.num_blocks, *compressed.shape), nan, dtype=dtype, device=device)

    def run(self) -> None:
        rows = slice(0, self.batch.num_tokens)
        kv, score = self.kv_rows[rows], self.score_rows[rows].expand(-1, self.kv_rows.shape[1])
        caches = (self.state, self.cache, self.batch.block_table)
        with poisoned_memory():
            self.operator(kv, score, self.weight, *caches, *self.batch.facts, self.ratio, self.eps)

    def step(self, run: Callable[[], None] | None = None) -> None:
        """One batch, as loaded. Its last tokens must then be in the state, and entries that it completes in the
        cache, right or wrong; nothing else may have changed."""
        self.batch.gather(self.kv, self.kv_rows)
        self.batch.gather(self.score, self.score_rows)
        state, cache = self.state.clone(), self.cache.clone()
        (run or self.run)()
        length = state.shape[1]
        for chunk, first in zip(self.batch.chunks, self.batch.starts, strict=False):
            if chunk.slot < 0:
                continue
            for index in range(max(0, chunk.length - length), chunk.length):
                row = state[chunk.slot, (chunk.start + index) % length]
                row[0], row[1] = self.kv_rows[first + index], self.score_rows[first + index]
            for entry in range(chunk.start // self.ratio, chunk.end // self.ratio):
                block, offset = divmod(entry, cache.shape[1])
                cache[chunk.blocks[block], offset] = self.cache[chunk.blocks[block], offset]
        assert same_bytes(self.state, state), "other states changed than the batch's"
        assert same_bytes(self.cache, cache), "other entries changed than those that the batch completes"

    def serve(self, schedule: Schedule, run: Callable[[], None] | None = None, **padding: int) -> None:
        """Serve every sequence, and compare the entries of each once its last token is served."""
        finished = set()
        for chunks in schedule:
            self.batch.load(chunks, **padding)
            self.step(run)
            for chunk in chunks:
                if chunk.start + chunk.right == len(self.kv[chunk.sequence]):
                    self.assert_entries(chunk)
                    finished.add(chunk.sequence)
        assert finished == set(range(len(self.kv)))

    def assert_entries(self, chunk: Chunk) -> None:
        """Every entry up to the chunk's end is the dense one."""
        kv, score = self.kv[chunk.sequence][: chunk.end], self.score[chunk.sequence][: chunk.end]
        expected = dense_entries(kv, score.expand_as(kv), self.weight, ratio=self.ratio, eps=self.eps)
        tolerance = TOLERANCE[self.cache.dtype]
        entries = self.cache[list(chunk.blocks)].flatten(0, 1)[: len(expected)]
        torch.testing.assert_close(entries.double(), expected, atol=tolerance, rtol=tolerance)


@implementations
@dtypes
@pytest.mark.parametrize(
    "change",
    [{}, {"ratio": 2, "dim": 16}, {"ratio": 8, "dim": 130, "num_draft_tokens": 2}, {"score_dim": 1}],
    ids=str,
)
def test_sequences_served_in_chunks_of_mixed_batches_give_the_dense_entries(
    name: str, dtype: torch.dtype, change: dict[str, Any]
) -> None:
    Compressor(name, dtype, **change).serve(random_schedule(LENGTHS, SIZES, seed=1))


@implementations
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
def test_rejected_drafts_leave_no_trace_in_the_entries(name: str, num_draft_tokens: int) -> None:
    """Five drafts and a ratio of four: entries of nothing but rejected tokens are replaced, too."""
    schedule = random_schedule(LENGTHS, SIZES, seed=2, num_draft_tokens=num_draft_tokens)
    assert any(chunk.right < chunk.length for chunks in schedule for chunk in chunks)
    Compressor(name, torch.float32, num_draft_tokens=num_draft_tokens).serve(schedule)


@implementations
def test_all_drafts_rejected_again_and_again_leave_no_trace(name: str) -> None:
    steps = [[Chunk(sequence=0, start=p, length=4, right=1, slot=2, blocks=(5, 3))] for p in range(9)]
    Compressor(name, torch.float32, num_draft_tokens=3, lengths=[12]).serve(
        [*steps, [Chunk(sequence=0, start=9, length=3, right=3, slot=2, blocks=(5, 3))]]
    )


@implementations
def test_a_request_in_a_reused_slot_sees_nothing_of_the_old_one(name: str) -> None:
    old = Chunk(sequence=0, start=0, length=7, right=7, slot=1, blocks=(0,))
    new = [Chunk(sequence=1, start=start, length=1, right=1, slot=1, blocks=(2,)) for start in range(5)]
    Compressor(name, torch.float32, lengths=[7, 5]).serve([[old], *([chunk] for chunk in new)])


@implementations
def test_an_inert_request_writes_neither_state_nor_entries(name: str) -> None:
    compressor = Compressor(name, torch.float32)
    real = Chunk(sequence=3, start=0, length=5, right=5, slot=0, blocks=(7,))
    compressor.batch.load([Chunk(sequence=2, start=2, length=9, right=9, slot=-1, blocks=(7, 8)), real])
    compressor.step()
    compressor.assert_entries(real)


@implementations
@pytest.mark.parametrize("num_tokens", [0, 4])
def test_a_batch_of_padding_changes_nothing(name: str, num_tokens: int) -> None:
    compressor = Compressor(name, torch.float32)
    compressor.batch.load([], num_tokens=num_tokens)
    compressor.step()


@implementations
def test_scores_of_minus_infinity_take_tokens_out_of_their_window(name: str) -> None:
    compressor = Compressor(name, torch.float32)
    for score in compressor.score:
        score[::4] = float("-inf")
    compressor.serve(random_schedule(LENGTHS, SIZES, seed=4))


@implementations
@dtypes
def test_strided_inputs_and_caches_are_read_and_written_in_place(name: str, dtype: torch.dtype) -> None:
    """Inputs are slices of a fused projection; caches may share their rows with other layers'."""
    compressor = Compressor(name, dtype, lengths=LENGTHS[3:])
    tokens, dim = compressor.kv_rows.shape
    fused = torch.full((tokens, 3 * dim), float("nan"), dtype=dtype)
    compressor.kv_rows, compressor.score_rows = fused[:, :dim], fused[:, dim : 2 * dim]
    wide_state = torch.full((*compressor.state.shape[:3], 2 * dim), float("nan"))
    wide_cache = torch.full((*compressor.cache.shape[:2], 2 * dim), float("nan"), dtype=dtype)
    compressor.state, compressor.cache = wide_state[..., dim:], wide_cache[..., dim:]
    compressor.serve(random_schedule(LENGTHS[3:], SIZES, seed=3))
    assert fused[:, 2 * dim :].isnan().all()
    assert wide_state[..., :dim].isnan().all()
    assert wide_cache[..., :dim].isnan().all()


def test_the_kernel_walks_a_window_that_is_longer_than_its_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = Compressor("kernels", torch.float32, ratio=8)
    monkeypatch.setattr("attention.backends.kv_compressor.kernels._TILE", 64)
    compressor.score[2][:5] = float("-inf")
    compressor.serve(random_schedule(LENGTHS, SIZES, seed=1))


def test_the_kernel_says_which_tensor_has_a_strided_last_dimension() -> None:
    compressor = Compressor("kernels", torch.float32)
    compressor.batch.load([])
    compressor.kv_rows = compressor.kv_rows.T.contiguous().T
    with pytest.raises(ValueError, match=r"contiguous last dimensions.*'kv': \(1, "):
        compressor.run()
