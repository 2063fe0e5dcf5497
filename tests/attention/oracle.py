"""A plain dense attention that shares no code with any backend, and random paged batches to test them on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attention.metadata import CommonAttentionMetadata
from attention.specs import AttentionSpec

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Absolute and relative, of outputs of order 1."""

Requests = Sequence[tuple[int, int]]
"""(query_len, seq_len) of each request, tokens; (0, 0) is a padded request."""


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> torch.Tensor:
    """Softmax attention of one request in fp64, row by row over the keys the row sees and no others.

    query: [q, num_heads, d], the last q tokens of the sequence. key, value: [n, num_kv_heads, d]. The result
    is [q, num_heads, d] fp64, on the inputs' device.
    """
    group = query.shape[1] // key.shape[1]
    # Query head h reads KV head h // group.
    key, value = key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    rows = []
    for index, row in enumerate(query.double()):
        position = key.shape[0] - query.shape[0] + index
        oldest = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        seen = slice(oldest, position + 1)
        scores = (key[seen] * row).sum(-1) * scale  # [keys, num_heads]
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        rows.append((scores.softmax(0)[:, :, None] * value[seen]).sum(0))
    return torch.stack(rows)


class PagedBatch:
    """Buffers of one padded size; `fill` loads them in place with one random batch after another.

    Everything that a backend must not read is poisoned: cache blocks that no request owns, the tail of last
    blocks and padded query rows hold NaN; entries of the block table past a sequence are ids of no block, or
    with `stale_table`, of a block full of NaN.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        num_tokens: int,
        num_reqs: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
        stale_table: bool = False,
        seed: int = 0,
    ) -> None:
        self.spec, self.device, self.stale_table = spec, torch.device(device), stale_table
        self.num_tokens, self.num_reqs, self.max_model_len = num_tokens, num_reqs, max_model_len
        self.generator = torch.Generator().manual_seed(seed)
        max_num_blocks = -(-max_model_len // spec.block_size) + 1
        # Block 0 and as many as one more request would need are nobody's.
        num_blocks = 1 + (num_reqs + 1) * max_num_blocks

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        self.query = buffer(num_tokens, spec.num_heads, spec.head_size, dtype=spec.dtype)
        self.out = torch.empty_like(self.query)
        self.kv_cache = buffer(num_blocks, *spec.caches()["kv_cache"].shape, dtype=spec.dtype)
        self.query_start_loc = buffer(num_reqs + 1, dtype=torch.int32)
        self.seq_lens = buffer(num_reqs, dtype=torch.int32)
        self.block_table = buffer(num_reqs, max_num_blocks, dtype=torch.int32)
        self.slot_mapping = buffer(num_tokens, dtype=torch.int64)
        self.token_request = buffer(num_tokens, dtype=torch.int32)
        self.requests: Requests = ()
        self.expected = torch.empty(0)

    @classmethod
    def padded(cls, spec: AttentionSpec, requests: Requests, **settings: Any) -> PagedBatch:
        """Loaded with `requests`, and padded by five tokens and two requests; others as for `PagedBatch`."""
        num_tokens = sum(query_len for query_len, _ in requests) + 5
        batch = cls(spec, num_tokens=num_tokens, num_reqs=len(requests) + 2, **settings)
        batch.fill(requests)
        return batch

    @property
    def limits(self) -> dict[str, Any]:
        """What a builder for such batches is made with."""
        return {
            "max_num_reqs": self.num_reqs,
            "max_num_tokens": self.num_tokens,
            "max_model_len": self.max_model_len,
            "device": self.device,
        }

    def fill(self, requests: Requests) -> None:
        """Load a random batch of these lengths; `expected` is then [true tokens, num_heads, d] fp64."""
        spec, requests = self.spec, [*requests] + [(0, 0)] * (self.num_reqs - len(requests))
        num_tokens = sum(query_len for query_len, _ in requests)
        assert len(requests) == self.num_reqs, f"{len(requests)} requests do not fit into {self.num_reqs}"
        assert num_tokens <= self.num_tokens, f"{num_tokens} tokens do not fit into {self.num_tokens}"
        query = torch.full(self.query.shape, float("nan"), dtype=spec.dtype)
        self.kv_cache.fill_(float("nan"))
        table = torch.full(self.block_table.shape, 0 if self.stale_table else 1 << 30, dtype=torch.int32)
        slots = torch.full(self.slot_mapping.shape, -1)
        free = torch.randperm(self.kv_cache.shape[0] - 1, generator=self.generator) + 1
        starts, expected = [0], []
        for request, (query_len, seq_len) in enumerate(requests):
            start, end = starts[-1], starts[-1] + query_len
            starts.append(end)
            if query_len == 0:
                continue
            # Twice the usual variance, so that the softmax is not flat and a wrong key shows.
            rows = 2 * self._randn(query_len, spec.num_heads)
            key = self._randn(seq_len, spec.num_kv_heads).to(self.device)
            value = self._randn(seq_len, spec.num_kv_heads).to(self.device)
            query[start:end] = rows
            num_blocks = -(-seq_len // spec.block_size)
            blocks, free = free[:num_blocks], free[num_blocks:]
            table[request, :num_blocks] = blocks
            for logical, block in enumerate(blocks.tolist()):
                owned = slice(logical * spec.block_size, (logical + 1) * spec.block_size)
                self.kv_cache[block, 0, : len(key[owned])] = key[owned]
                self.kv_cache[block, 1, : len(value[owned])] = value[owned]
            for token in range(start, end):
                logical, offset = divmod(seq_len - end + token, spec.block_size)
                slots[token] = blocks[logical] * spec.block_size + offset
            dense = dense_attention(
                rows.to(self.device),
                key,
                value,
                scale=spec.scale,
                sliding_window=spec.sliding_window,
                soft_cap=spec.soft_cap,
            )
            expected.append(dense)
        self.requests, self.expected = requests, torch.cat(expected)
        self.query.copy_(query)
        self.block_table.copy_(table)
        self.slot_mapping.copy_(slots)
        of_token = [r for r, (query_len, _) in enumerate(requests) for _ in range(query_len)]
        self.token_request.fill_(-1)
        self.token_request[: len(of_token)] = torch.tensor(of_token, dtype=torch.int32)
        self.query_start_loc.copy_(torch.tensor(starts, dtype=torch.int32))
        self.seq_lens.copy_(torch.tensor([seq_len for _, seq_len in requests], dtype=torch.int32))
        self.out.fill_(float("nan"))

    def fill_at_random(self, rng: random.Random, *, max_query_len: int) -> None:
        """Load a random batch of requests of up to `max_query_len` tokens."""
        sizes = {"num_tokens": self.num_tokens, "num_reqs": self.num_reqs, "max_model_len": self.max_model_len}
        self.fill(random_requests(rng, max_query_len=max_query_len, **sizes))

    def common(self, *, max_query_len: int | None = None, max_seq_len: int | None = None) -> CommonAttentionMetadata:
        """The batch's facts, with true maxima unless other upper bounds are given."""
        return CommonAttentionMetadata(
            num_reqs=self.num_reqs,
            num_tokens=self.num_tokens,
            num_actual_tokens=len(self.expected),
            max_query_len=max_query_len or max(query_len for query_len, _ in self.requests),
            max_seq_len=max_seq_len or max(seq_len for _, seq_len in self.requests),
            query_start_loc=self.query_start_loc,
            query_start_loc_cpu=self.query_start_loc.cpu(),
            seq_lens=self.seq_lens,
            seq_lens_cpu=self.seq_lens.cpu(),
            block_table=self.block_table,
            slot_mapping=self.slot_mapping,
            token_request=self.token_request,
            state_slots=torch.full_like(self.seq_lens, -1),
        )

    def assert_out_is_right(self) -> None:
        """`out` is the oracle's on every true token, and untouched past them."""
        true = len(self.expected)
        tolerance = TOLERANCE[self.spec.dtype]
        torch.testing.assert_close(self.out[:true].double(), self.expected, atol=tolerance, rtol=tolerance)
        assert self.out[true:].isnan().all(), "rows past the true tokens were written"

    def _randn(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        values = torch.randn(num_tokens, num_heads, self.spec.head_size, generator=self.generator)
        return values.to(self.spec.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the grid: what is computed, and the lengths of the batch it is computed for."""

    heads: tuple[int, int]
    head_size: int
    block_size: int
    dtype: torch.dtype
    requests: str
    sliding_window: int | None = None
    soft_cap: float | None = None

    @property
    def lengths(self) -> Requests:
        return REQUESTS[self.requests]

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_size=self.head_size,
            block_size=self.block_size,
            dtype=self.dtype,
            scale=self.head_size**-0.5,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )

    def __str__(self) -> str:
        window = f" window {self.sliding_window}" if self.sliding_window else ""
        cap = f" cap {self.soft_cap:g}" if self.soft_cap else ""
        dtype = str(self.dtype).removeprefix("torch.")
        heads = "/".join(map(str, self.heads))
        return f"{self.requests} {heads} d{self.head_size} b{self.block_size} {dtype}{window}{cap}"


REQUESTS: dict[str, Requests] = {
    "prefill": [(37, 37), (1, 1), (64, 64), (131, 131)],
    "chunked": [(33, 100), (16, 150), (5, 5), (70, 201)],
    "decode": [(1, 1), (1, 17), (1, 128), (1, 201)],
    "speculative": [(4, 90), (4, 4), (4, 33)],
    "one chunk": [(40, 200)],
    "mixed": [(1, 140), (70, 70), (0, 0), (1, 5), (20, 95), (1, 64)],
}
"""Lengths around the edges of blocks and tiles; a request of none in the midst of others."""


def grid(half: torch.dtype) -> list[Case]:
    """Every pair of head counts, head size, block size, batch, window and cap that matters, in few cases.

    `half` is the 16-bit dtype; the other half of the cases is in fp32.
    """
    full = torch.float32
    rows: list[tuple[tuple[int, int], int, int, torch.dtype, str, int | None, float | None]] = [
        ((4, 4), 64, 16, full, "prefill", None, None),
        ((8, 2), 64, 32, half, "prefill", 50, None),
        ((4, 1), 80, 16, half, "prefill", None, 3.0),
        ((9, 3), 128, 64, full, "prefill", 1, None),
        ((8, 2), 256, 16, half, "prefill", None, None),
        ((8, 2), 64, 16, half, "chunked", None, None),
        ((4, 4), 128, 32, half, "chunked", 70, 3.0),
        ((4, 1), 256, 64, full, "chunked", None, None),
        ((9, 3), 80, 32, full, "chunked", 16, None),
        ((4, 1), 64, 32, half, "one chunk", 100, None),
        ((4, 1), 64, 64, half, "decode", None, None),
        ((8, 2), 80, 64, full, "decode", None, 3.0),
        ((9, 3), 64, 16, half, "decode", 33, None),
        ((4, 4), 256, 32, full, "decode", 100, 3.0),
        ((8, 2), 128, 16, half, "decode", None, None),
        ((8, 2), 64, 32, half, "speculative", None, None),
        ((4, 1), 128, 16, full, "speculative", 3, None),
        ((9, 3), 80, 64, half, "speculative", None, 3.0),
        ((8, 2), 128, 64, half, "mixed", None, None),
        ((9, 3), 64, 32, full, "mixed", None, 3.0),
        ((4, 4), 80, 16, half, "mixed", 64, None),
        ((4, 1), 256, 16, half, "mixed", 20, None),
        ((8, 2), 64, 16, full, "mixed", 65, 3.0),
    ]
    return [Case(*row) for row in rows]


def random_requests(
    rng: random.Random, *, num_tokens: int, num_reqs: int, max_query_len: int, max_model_len: int
) -> Requests:
    """A random mix of at most these sizes; about half of the requests decode one token."""
    requests, left = [], num_tokens
    for _ in range(rng.randint(1, num_reqs)):
        if left == 0:
            break
        query_len = 1 if rng.random() < 0.5 else rng.randint(1, min(left, max_query_len))
        context = 0 if rng.random() < 0.2 else rng.randint(0, max_model_len - query_len)
        requests.append((query_len, query_len + context))
        left -= query_len
    return requests
