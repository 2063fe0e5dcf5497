"""Sequences served in random chunks of mixed batches, in poisoned buffers: how operators with caches are tested."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from attention.metadata import CommonAttentionMetadata

implementations = pytest.mark.parametrize("name", ["reference", "kernels"], ids=["reference", "triton"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens of one sequence that make up one request of a batch."""

    sequence: int
    start: int
    """Position of the first token."""
    length: int
    right: int
    """The first so many tokens are the sequence's own; the others are drafts that will be rejected."""
    slot: int
    blocks: tuple[int, ...] = (0, 1)
    """Physical blocks of the whole sequence."""

    @property
    def end(self) -> int:
        return self.start + self.length


Schedule = Sequence[Sequence[Chunk]]
"""The batches that serve some sequences from beginning to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a runner's buffers and caches."""

    max_num_reqs: int = 4
    max_chunk: int = 9
    """Tokens that one request may have in a batch."""
    num_slots: int = 4
    num_blocks: int = 16
    block_size: int = 8
    max_num_blocks: int = 5

    @property
    def max_num_tokens(self) -> int:
        return self.max_num_reqs * self.max_chunk


SIZES = Sizes()
LENGTHS = (17, 1, 40, 5, 2, 11)
"""Of the sequences that are served, tokens: more of them than slots, and one that fills its blocks to the last row."""


def random_schedule(lengths: Sequence[int], sizes: Sizes, *, seed: int, num_draft_tokens: int = 0) -> Schedule:
    """Serve sequences of these lengths, interleaved, as slots and blocks become free.

    About half of the chunks have one token. With `num_draft_tokens`, chunks after the first are a right token and up to
    so many drafts, of which a random number is right; the next chunk starts after the last right one.
    """
    rng = random.Random(seed)
    slots, blocks = list(range(sizes.num_slots)), list(range(sizes.num_blocks))
    rng.shuffle(slots)
    rng.shuffle(blocks)
    waiting, done = list(range(len(lengths))), [0] * len(lengths)
    running: dict[int, tuple[int, tuple[int, ...]]] = {}
    batches = []
    while waiting or running:
        while waiting and slots and (not running or rng.random() < 0.7):
            needed = -(-lengths[waiting[0]] // sizes.block_size)
            running[waiting.pop(0)] = (slots.pop(0), tuple(blocks.pop(0) for _ in range(needed)))
        chosen = rng.sample(sorted(running), rng.randint(1, min(len(running), sizes.max_num_reqs)))
        batch = []
        for sequence in chosen:
            start, left = done[sequence], lengths[sequence] - done[sequence]
            drafting = num_draft_tokens > 0 and start > 0
            most = min(left, 1 + num_draft_tokens if drafting else sizes.max_chunk)
            length = 1 if rng.random() < 0.5 and not drafting else rng.randint(1, most)
            right = rng.randint(1, length) if drafting else length
            slot, owned = running[sequence]
            batch.append(Chunk(sequence=sequence, start=start, length=length, right=right, slot=slot, blocks=owned))
            done[sequence] += right
        batches.append(batch)
        for sequence in [sequence for sequence in running if done[sequence] == lengths[sequence]]:
            slot, owned = running.pop(sequence)
            slots.append(slot)
            blocks.extend(owned)
    return batches


class Batch:
    """A runner's persistent buffers, longer than any batch. `load` fills them in place for one batch.

    Past the batch they hold what an earlier one could have left: plausible ids, which nothing must follow.
    """

    def __init__(self, sizes: Sizes, *, device: torch.device | str = "cpu", seed: int = 0) -> None:
        self.sizes, self.device = sizes, torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)
        self.chunks: Sequence[Chunk] = ()
        self.starts: list[int] = [0]
        self.num_tokens = 0
        tokens, reqs = sizes.max_num_tokens + 3, sizes.max_num_reqs + 2

        def buffer(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=self.device)

        self.token_request, self.query_start_loc = buffer(tokens), buffer(reqs + 1)
        self.seq_lens, self.state_slots = buffer(reqs), buffer(reqs)
        self.block_table = buffer(reqs, sizes.max_num_blocks)
        self.slot_mapping = torch.empty(tokens, dtype=torch.int64, device=self.device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The buffers by the names under which layers have them."""
        names = ("token_request", "query_start_loc", "seq_lens", "state_slots", "block_table", "slot_mapping")
        return {name: getattr(self, name) for name in names}

    @property
    def facts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What operators of a request's state get after their own arguments."""
        return self.token_request, self.query_start_loc, self.seq_lens, self.state_slots

    def load(self, chunks: Sequence[Chunk], *, num_tokens: int | None = None) -> None:
        """Make `chunks` the batch, padded to `num_tokens` tokens; by default, with two padded ones."""
        sizes, self.chunks = self.sizes, chunks
        self.starts = [0]
        for chunk in chunks:
            self.starts.append(self.starts[-1] + chunk.length)
        self.num_tokens = self.starts[-1] + 2 if num_tokens is None else num_tokens
        assert self.starts[-1] <= self.num_tokens <= sizes.max_num_tokens + 2, "the batch does not fit"
        token_request = self._stale(self.token_request, sizes.max_num_reqs)
        token_request[: self.num_tokens] = -1
        query_start_loc = self._stale(self.query_start_loc, sizes.max_num_tokens)
        query_start_loc[: len(self.starts)] = torch.tensor(self.starts)
        seq_lens = self._stale(self.seq_lens, sizes.block_size * sizes.max_num_blocks)
        state_slots = self._stale(self.state_slots, sizes.num_slots)
        block_table = self._stale(self.block_table, sizes.num_blocks)
        slot_mapping = self._stale(self.slot_mapping, sizes.num_blocks * sizes.block_size)
        slot_mapping[: self.num_tokens] = -1
        for request, chunk in enumerate(chunks):
            token_request[self.starts[request] : self.starts[request + 1]] = request
            seq_lens[request], state_slots[request] = chunk.end, chunk.slot
            block_table[request, : len(chunk.blocks)] = torch.tensor(chunk.blocks)
            for token, position in enumerate(range(chunk.start, chunk.end), start=self.starts[request]):
                block, row = divmod(position, sizes.block_size)
                slot_mapping[token] = chunk.blocks[block] * sizes.block_size + row
        self.token_request.copy_(token_request)
        self.query_start_loc.copy_(query_start_loc)
        self.seq_lens.copy_(seq_lens)
        self.state_slots.copy_(state_slots)
        self.block_table.copy_(block_table)
        self.slot_mapping.copy_(slot_mapping)

    def gather(self, sequences: Sequence[torch.Tensor], into: torch.Tensor) -> None:
        """The batch's rows of `sequences` go to `into` [>= num_tokens, ...]; rubbish to drafts, NaN to padding."""
        into.fill_(float("nan"))
        for chunk, first in zip(self.chunks, self.starts, strict=False):
            rows = sequences[chunk.sequence][chunk.start : chunk.end].clone()
            rows[chunk.right :] = 5 - 3 * rows[chunk.right :]
            into[first : first + chunk.length] = rows

    def scatter(self, rows: torch.Tensor, sequences: Sequence[torch.Tensor]) -> None:
        """The opposite of `gather`, for the right tokens."""
        for chunk, first in zip(self.chunks, self.starts, strict=False):
            sequences[chunk.sequence][chunk.start : chunk.start + chunk.right] = rows[first : first + chunk.right]

    def common(self) -> CommonAttentionMetadata:
        """The batch's facts, as a metadata builder gets them."""
        reqs = len(self.chunks)
        return CommonAttentionMetadata(
            num_reqs=reqs,
            num_tokens=self.num_tokens,
            num_actual_tokens=self.starts[-1],
            max_query_len=self.sizes.max_chunk,
            max_seq_len=self.sizes.block_size * self.sizes.max_num_blocks,
            query_start_loc=self.query_start_loc[: reqs + 1],
            query_start_loc_cpu=self.query_start_loc[: reqs + 1].cpu(),
            seq_lens=self.seq_lens[:reqs],
            seq_lens_cpu=self.seq_lens[:reqs].cpu(),
            block_table=self.block_table[:reqs],
            slot_mapping=self.slot_mapping[: self.num_tokens],
            token_request=self.token_request[: self.num_tokens],
            state_slots=self.state_slots[:reqs],
        )

    def _stale(self, buffer: torch.Tensor, limit: int) -> torch.Tensor:
        return torch.randint(0, limit, buffer.shape, generator=self.generator, dtype=buffer.dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, torch.empty and its kin are full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def skip_without_interpreter() -> None:
    """Kernels on CPU tensors need Triton's interpreter, which `tests/conftest.py` turns on where there is no GPU."""
    triton: ModuleType = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("with a GPU the kernels are compiled for it; see tests/gpu/test_like_ops.py")
