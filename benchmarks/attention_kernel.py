"""The Triton attention kernel by itself: microseconds a call, and its share of the memory's rate.

    python benchmarks/attention_kernel.py [--shapes qwen3-0.6b llama-3.1-8b] [--batches 1 8 32 128] [--context 1024]
        [--prefill 4x64 8x1024] [--configs 64,4,4,0 64,4,3,16] [--out FOLDER]

Calls are recorded in one CUDA graph, over caches that take turns and together do not fit into the L2 cache. A config is
block_n,num_warps,num_stages,splits, with 0 splits for as many as are planned; without any, all is as planned. Each is
checked against dense attention first: a wrong one gets no figure, and the exit status is 1. On the CPU, which needs
TRITON_INTERPRET=1, calls are merely tried out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.backends.triton.backend import INTERPRETED, TritonAttentionImpl
from attention.backends.triton.plan import LaunchPlan, TritonMetadata, TritonMetadataBuilder
from attention.metadata import CommonAttentionMetadata
from attention.specs import AttentionSpec
from benchmarks.record import RESULTS, write

# (num_heads, num_kv_heads, head_size)
SHAPES = {"qwen3-0.6b": (16, 8, 128), "llama-3.1-8b": (32, 8, 128), "tiny": (4, 2, 64)}
BLOCK_SIZE = 16
CALLS = 32
"""Calls a graph: about the layers of a model."""
TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Config:
    """What a plan's tile and splits are replaced by."""

    block_n: int
    num_warps: int
    num_stages: int
    splits: int

    @classmethod
    def parse(cls, text: str) -> Config:
        values = [int(value) for value in text.split(",")]
        if len(values) != 4:
            raise argparse.ArgumentTypeError(f"{text!r} is not block_n,num_warps,num_stages,splits")
        return cls(*values)

    def of(self, plan: LaunchPlan) -> LaunchPlan:
        tile = dataclasses.replace(
            plan.tile, block_n=self.block_n, num_warps=self.num_warps, num_stages=self.num_stages
        )
        if self.splits == 0:
            return dataclasses.replace(plan, tile=tile)
        # However few keys that leaves a split.
        tile = dataclasses.replace(tile, split_keys=BLOCK_SIZE)
        return dataclasses.replace(plan, tile=tile, num_splits=self.splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests of one length: a decode step, or a prefill of whole sequences."""

    shape: str
    num_reqs: int
    query_len: int
    seq_len: int

    def __str__(self) -> str:
        kind = f"decode of {self.seq_len}" if self.query_len == 1 else f"prefill of {self.query_len}"
        return f"{self.shape} {self.num_reqs} x {kind}"

    def spec(self, dtype: torch.dtype) -> AttentionSpec:
        num_heads, num_kv_heads, head_size = SHAPES[self.shape]
        return AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            scale=head_size**-0.5,
        )

    def work(self, spec: AttentionSpec) -> tuple[int, int]:
        """(bytes, operations) of one call: each key and value is read once, queries read and results written."""
        keys_and_values = 2 * self.num_reqs * self.seq_len * spec.num_kv_heads
        queries_and_results = 2 * self.num_reqs * self.query_len * spec.num_heads
        moved = (keys_and_values + queries_and_results) * spec.head_size * spec.dtype.itemsize
        seen = self.query_len * self.seq_len - self.query_len * (self.query_len - 1) // 2
        return moved, 4 * self.num_reqs * seen * spec.num_heads * spec.head_size


class Bench:
    """One case's tensors, with caches that take turns."""

    def __init__(self, case: Case, device: torch.device, calls: int) -> None:
        self.case, self.device, self.calls = case, device, calls
        self.spec = spec = case.spec(torch.bfloat16 if device.type == "cuda" else torch.float16)
        blocks_each = -(-case.seq_len // BLOCK_SIZE)
        blocks = case.num_reqs * blocks_each
        cache = torch.empty(blocks, *spec.caches()["kv_cache"].shape, dtype=spec.dtype, device=device)
        self.caches = [torch.randn_like(cache) for _ in range(_num_caches(cache.nbytes, device, calls))]
        tokens = case.num_reqs * case.query_len
        self.query = torch.randn(tokens, spec.num_heads, spec.head_size, dtype=spec.dtype, device=device) * 2
        self.out = torch.empty_like(self.query)
        self.table = torch.randperm(blocks, device=device).to(torch.int32).view(case.num_reqs, blocks_each)
        self.impl = TritonAttentionImpl(spec)
        self.expected = self._dense()

    def metadata(self, config: Config | None, max_model_len: int) -> TritonMetadata:
        """As it is built for capture, but for what `config` changes, with a workspace for that."""
        case, spec = self.case, self.spec
        builder = TritonMetadataBuilder(
            spec,
            max_num_reqs=case.num_reqs,
            max_num_tokens=len(self.query),
            max_model_len=max_model_len,
            device=self.device,
        )
        metadata = builder.build(self._common(), for_capture=True)
        if config is None:
            return metadata
        plan = config.of(metadata.plan)
        rows = len(self.query) * spec.num_heads * plan.num_splits
        return dataclasses.replace(
            metadata,
            plan=plan,
            partial_out=torch.empty(rows, spec.head_size, device=self.device),
            partial_lse=torch.empty(rows, device=self.device),
            arrivals=torch.zeros(plan.num_query_blocks * spec.num_kv_heads, dtype=torch.int32, device=self.device),
        )

    def check(self, metadata: TritonMetadata) -> float | None:
        """The largest difference from dense attention, relative to 1 + the result; None where that is too much, or a
        second run's bits differ."""
        results = []
        for _ in range(2):
            self.out.fill_(float("nan"))
            metadata.partial_out.fill_(float("nan"))
            metadata.partial_lse.fill_(float("nan"))
            self.impl.forward(self.query, self.caches[0], metadata, self.out)
            results.append(self.out.clone())
        difference = ((results[0].float() - self.expected).abs() / (1 + self.expected.abs())).max().item()
        right = difference <= TOLERANCE and torch.equal(*results) and not metadata.arrivals.any()
        return difference if right else None

    def microseconds(self, metadata: TritonMetadata, repeats: int) -> float:
        """Of one call in a graph of many: the median of `repeats` replays."""

        def run() -> None:
            for call in range(self.calls):
                self.impl.forward(self.query, self.caches[call % len(self.caches)], metadata, self.out)

        if self.device.type != "cuda":
            started = time.perf_counter()
            run()
            return (time.perf_counter() - started) / self.calls * 1e6
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return statistics.median(_event_times(graph.replay, repeats)) / self.calls * 1e3

    def _common(self) -> CommonAttentionMetadata:
        case, tokens = self.case, len(self.query)
        starts = torch.arange(0, tokens + 1, case.query_len, dtype=torch.int32)
        lengths = torch.full((case.num_reqs,), case.seq_len, dtype=torch.int32)
        nowhere = torch.full((tokens,), -1, device=self.device)
        return CommonAttentionMetadata(
            num_reqs=case.num_reqs,
            num_tokens=tokens,
            num_actual_tokens=tokens,
            max_query_len=case.query_len,
            max_seq_len=case.seq_len,
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(self.device),
            seq_lens_cpu=lengths,
            block_table=self.table,
            slot_mapping=nowhere,
            token_request=nowhere.to(torch.int32),
            state_slots=torch.full_like(lengths, -1, device=self.device),
        )

    def _dense(self) -> torch.Tensor:
        """[num_tokens, num_heads, head_size] fp32, from the first cache."""
        rows = []
        for table, query in zip(self.table.long(), self.query.split(self.case.query_len), strict=True):
            # [block, key or value, slot, head, dim] -> [key or value, 1, head, slot of all blocks, dim]
            both = self.caches[0][table].permute(1, 3, 0, 2, 4).flatten(2, 3)[:, None, :, : self.case.seq_len]
            key, value = both.float()
            asked = query.float().transpose(0, 1)[None]
            causal = self.case.query_len > 1
            with sdpa_kernel(SDPBackend.MATH):  # others may round fp32 operands
                seen = F.scaled_dot_product_attention(
                    asked, key, value, is_causal=causal, scale=self.spec.scale, enable_gqa=True
                )
            rows.append(seen[0].transpose(0, 1))
        return torch.cat(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=1024, help="tokens in each cache of a decode step")
    parser.add_argument("--prefill", nargs="*", default=["4x64", "8x1024"], help="requests x tokens of each")
    parser.add_argument("--configs", nargs="+", type=Config.parse, default=[], help="see above")
    parser.add_argument("--max-model-len", type=int, default=4096, help="the length that splits are planned for")
    parser.add_argument("--rate", type=float, default=4200, help="of the memory, GB/s")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--calls", type=int, default=CALLS, help="calls a graph")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available() and not INTERPRETED:
        parser.error("there is no CUDA GPU; to try it out on the CPU, set TRITON_INTERPRET=1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for case in cases(arguments):
        bench = Bench(case, device, arguments.calls)
        rows += [measure(bench, config, arguments) for config in arguments.configs or [None]]
    print(write("attention_kernel", {"rate_gb_per_s": arguments.rate, "rows": rows}, arguments.out))
    return int(any(row["largest_difference"] is None for row in rows if "skipped" not in row))


def cases(arguments: argparse.Namespace) -> list[Case]:
    found = []
    for shape in arguments.shapes:
        for num_reqs in arguments.batches:
            found.append(Case(shape=shape, num_reqs=num_reqs, query_len=1, seq_len=arguments.context))
        for text in arguments.prefill:
            num_reqs, length = map(int, text.split("x"))
            found.append(Case(shape=shape, num_reqs=num_reqs, query_len=length, seq_len=length))
    return found


def measure(bench: Bench, config: Config | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row of the record, printed too; "skipped" where the device lacks the shared memory or registers."""
    from triton.runtime.errors import OutOfResources

    metadata = bench.metadata(config, max(arguments.max_model_len, bench.case.seq_len))
    tile = metadata.plan.tile
    row: dict[str, Any] = {
        "case": str(bench.case),
        "config": f"{tile.block_n},{tile.num_warps},{tile.num_stages},{metadata.plan.num_splits}",
        "tile": dataclasses.asdict(tile),
        "num_splits": metadata.plan.num_splits,
    }
    try:
        row["largest_difference"] = bench.check(metadata)
    except OutOfResources as error:
        row["skipped"] = str(error)
    if row.get("largest_difference") is not None:
        us = bench.microseconds(metadata, arguments.repeats)
        moved, operations = bench.case.work(bench.spec)
        row |= {"us": us, "gb_per_s": moved / us / 1e3, "tflops": operations / us / 1e6}
        row["share_of_rate"] = row["gb_per_s"] / arguments.rate
    print(_line(row), flush=True)
    return row


def _line(row: dict[str, Any]) -> str:
    start = f"{row['case']:<40} {row['config']:<14}"
    if "skipped" in row:
        return f"{start} skipped: {row['skipped']}"
    if "us" not in row:
        return f"{start} WRONG"
    return (
        f"{start} {row['us']:8.2f} us {row['gb_per_s']:7.0f} GB/s {row['share_of_rate']:6.1%}"
        f" {row['tflops']:6.1f} TFLOP/s, within {row['largest_difference']:.4f}"
    )


def _num_caches(size: int, device: torch.device, calls: int) -> int:
    """As many caches of `size` bytes as are needed for four times the L2 cache, but not more than calls."""
    if device.type != "cuda":
        return 2
    wanted = 4 * torch.cuda.get_device_properties(device).L2_cache_size
    return min(calls, max(2, -(-wanted // size)))


def _event_times(run: Callable[[], None], repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` runs, after three that do not count."""
    for _ in range(3):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


if __name__ == "__main__":
    sys.exit(main())
