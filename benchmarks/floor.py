"""The least that a decode step can take: its bytes, at the rate at which this device copies memory.

python benchmarks/floor.py [--shapes qwen3-0.6b llama-3.1-8b] [--batches 1 8 32 128] [--context 1024] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.record import RESULTS, write
from benchmarks.shapes import SHAPES, dtype_on, on_meta


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rate = copy_rate(device)
    results: dict[str, Any] = {"copy_gb_per_s": rate / 1e9, "context": arguments.context, "shapes": {}}
    print(f"copy rate: {rate / 1e9:.0f} GB/s")
    for shape in arguments.shapes:
        floors = floors_ms(on_meta(shape, dtype_on(device)), arguments.batches, arguments.context, rate)
        results["shapes"][shape] = floors
        print(shape, ", ".join(f"batch {batch}: {ms:.3f} ms" for batch, ms in floors.items()), flush=True)
    print(write("floor", results, arguments.out))
    return 0


def copy_rate(device: torch.device, repeats: int = 10) -> float:
    """Bytes read and written in a second by the best of several copies of one large tensor."""
    size = 2**31 if device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return max(2 * size / _seconds(source, target) for _ in range(repeats))


def floors_ms(model: Any, batches: Sequence[int], context: int, rate: float) -> dict[str, float]:
    """Batch to milliseconds: weights once, and the keys and values of `context` tokens of each request.

    rate: bytes a second.
    """
    weights, each = weight_bytes(model), context * kv_bytes_per_token(model.config, model.dtype)
    return {str(batch): (weights + batch * each) / rate * 1e3 for batch in batches}


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a decode step reads: all but the embedding table, unless that is the head too."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if table is head else total - table.numel() * table.element_size()


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token in all layers."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * dtype.itemsize


def _seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    if source.device.type != "cuda":
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


if __name__ == "__main__":
    sys.exit(main())
