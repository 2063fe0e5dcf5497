"""What capturing costs: seconds and memory of every size, for each kind of batch.

    python benchmarks/capture.py --shape qwen3-0.6b [--mode FULL_AND_PIECEWISE] [--backend triton] [--out FOLDER]

Without `--capture-sizes`: the default 51 sizes up to 512, and as many for decode batches. Logits through some of the
graphs are compared with the plain model's first. Exits 1, after writing its record, when they differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from attention.huggingface import PagedCausalLM
from benchmarks import contenders as lib
from benchmarks.record import RESULTS, write
from benchmarks.shapes import SHAPES, build
from piecewise_backend.bench.engine_loop import EngineLoop, EngineSettings
from piecewise_backend.bench.logits import CHECK_PREFILL, CHECK_TOKENS, compare, expected_logits, make_prompts
from piecewise_backend.reporting.report import Report

CHECK_BATCHES = (1, 7, 32)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(arguments.shape, device)
    batches = [b for b in CHECK_BATCHES if b <= arguments.largest]
    prompts = make_prompts(max(batches), CHECK_TOKENS, model.config.vocab_size, seed=1)
    expected = expected_logits(model, prompts, CHECK_PREFILL)
    paged = PagedCausalLM(model)
    started = time.perf_counter()
    loop = EngineLoop(paged, arguments.mode, arguments.backend, settings(arguments))
    results = {"shape": arguments.shape, "mode": arguments.mode, "start_seconds": time.perf_counter() - started}
    results |= summary(loop.llm.report)
    results["check"] = {str(b): compare(loop.forced_logits(prompts[:b], CHECK_PREFILL), expected[:b]) for b in batches}
    results["facts"] = loop.facts()
    right = all(check["passed"] for check in results["check"].values())
    path = write(f"capture_{arguments.shape}", results, arguments.out)
    path.with_suffix(".md").write_text(table(results))
    print(table(results) if right else f"WRONG: {results['check']}")
    return 0 if right else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return parser.parse_args(argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every script that starts one engine asks for."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--mode", choices=lib.MODES, default="FULL_AND_PIECEWISE")
    parser.add_argument("--backend", default="triton" if on_gpu else "torch")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--capture-sizes", nargs="+", type=int, help="default: the 51 sizes up to 512")
    parser.add_argument("--largest", type=int, default=512, help="tokens and requests of a step at most")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--options", type=json.loads, default={}, help="more of the engine's options, as JSON")


def settings(arguments: argparse.Namespace) -> EngineSettings:
    """A small cache: while capturing nothing is written to it."""
    return EngineSettings(
        options=lib.engine_options(arguments, arguments.capture_sizes),
        max_num_reqs=arguments.largest,
        max_model_len=1024,
        chunk=max(arguments.largest, CHECK_TOKENS),
        num_blocks=1024,
    )


def summary(report: Report) -> dict[str, Any]:
    """Totals of each kind of batch, and every size."""
    kinds: dict[str, dict[str, float]] = {}
    for size in report.sizes:
        kind = kinds.setdefault(
            size.descriptor.partition(",")[0], {"sizes": 0, "graphs": 0, "seconds": 0.0, "mib": 0.0}
        )
        kind["sizes"] += 1
        kind["graphs"] += size.num_graphs
        kind["seconds"] += size.seconds
        kind["mib"] += size.memory_bytes / 2**20
    estimates = {f.name: getattr(report, f.name) for f in dataclasses.fields(report) if "estimate" in f.name}
    sizes = [dataclasses.asdict(size) | {"eager_ops": len(size.eager_ops)} for size in report.sizes]
    return {"kinds": kinds, "estimates": json.loads(json.dumps(estimates, default=_as_json)), "sizes": sizes}


def table(results: dict[str, Any]) -> str:
    """Markdown: totals."""
    lines = [f"{results['shape']}, {results['mode']}: captures, recorded without their warm-up runs.", ""]
    lines += ["| kind | sizes | graphs | seconds | MiB |", "|---|---:|---:|---:|---:|"]
    for name, kind in results["kinds"].items():
        lines.append(f"| {name} | {kind['sizes']} | {kind['graphs']} | {kind['seconds']:.2f} | {kind['mib']:.1f} |")
    return "\n".join([*lines, ""])


def _as_json(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
