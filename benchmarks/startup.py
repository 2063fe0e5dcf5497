"""How long a start takes, cold and warm, phase by phase; making the weights is not counted.

    python benchmarks/startup.py --shape qwen3-0.6b [--mode FULL_AND_PIECEWISE] [--capture-sizes 1 8 32] [--out FOLDER]

Cold: a new process with empty cache folders (this project's, Inductor's and Triton's). Warm: another process, with what
the cold one left there. Each compares its first logits with the plain model's. Exits 1, after writing its record, when
they differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch._dynamo.utils import compilation_time_metrics, get_compilation_metrics

from attention.huggingface import PagedCausalLM
from benchmarks import contenders as lib
from benchmarks.capture import add_arguments, settings, summary
from benchmarks.record import write
from benchmarks.shapes import build
from piecewise_backend.bench.engine_loop import EngineLoop
from piecewise_backend.bench.logits import CHECK_PREFILL, CHECK_TOKENS, compare, expected_logits, make_prompts

FOLDERS = ("MRV2_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
STARTS = ("cold", "warm")
PHASES = ("wrap", "read", "trace", "compile", "capture", "rest", "first_steps")
"""Reading a traced program from disk takes the place of tracing and compiling."""


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parse(given)
    if arguments.child:
        print(json.dumps(start(arguments)))
        return 0
    results: dict[str, Any] = {"shape": arguments.shape, "mode": arguments.mode, "starts": {}}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name.lower())) for name in FOLDERS}
        for name in STARTS:
            results["starts"][name] = found = in_new_process(given, caches)
            print(f"{name}: {found}", flush=True)
            path = write(f"startup_{arguments.shape}", results, arguments.out)
    right = all(found.get("check", {}).get("passed", False) for found in results["starts"].values())
    if right:
        found = results["starts"]
        results["warm_over_cold"] = found["warm"]["seconds"] / found["cold"]["seconds"]
        path = write(f"startup_{arguments.shape}", results, arguments.out)
        path.with_suffix(".md").write_text(table(results))
        print(table(results))
    return 0 if right else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def in_new_process(argv: Sequence[str], caches: dict[str, str]) -> dict[str, Any]:
    """What `start` returns there."""
    command = [sys.executable, __file__, *argv, "--child"]
    run = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, check=False)
    if run.returncode:
        return {"error": run.stderr[-4000:]}
    return json.loads(run.stdout.splitlines()[-1])


def start(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start once in this process: seconds of each phase, all together from the plain model to the first logits."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(arguments.shape, device)
    prompts = make_prompts(1, CHECK_TOKENS, model.config.vocab_size, seed=1)
    expected = expected_logits(model, prompts, CHECK_PREFILL)
    lib.synchronize()
    begun = time.perf_counter()
    paged = PagedCausalLM(model)
    wrapped = time.perf_counter()
    loop = EngineLoop(paged, arguments.mode, arguments.backend, settings(arguments))
    lib.synchronize()
    ready = time.perf_counter()
    got = loop.forced_logits(prompts, CHECK_PREFILL)
    lib.synchronize()
    through = time.perf_counter()
    report = loop.llm.report
    phases = {"wrap": wrapped - begun, "trace": trace_seconds(), "compile": report.compile_seconds}
    phases["read"] = report.program_seconds if report.program_source == "disk" else 0.0
    phases["capture"] = sum(size.seconds for size in report.sizes)
    phases["rest"] = ready - begun - sum(phases.values())
    phases["first_steps"] = through - ready
    return {
        "seconds": through - begun,
        "phases": phases,
        "program": report.program_source,
        "pieces": report.compiled,
        "captures": report.num_captures,
        "kinds": summary(report)["kinds"],
        "torch_seconds": torch_seconds(),
        "reasons": [f"{reason.code}: {reason}" for reason, _ in report.reasons],
        "check": compare(got, expected),
    }


def trace_seconds() -> float:
    """Dynamo's own time in this process: compiled frames without what the backend took for them."""
    total = 0.0
    for metrics in get_compilation_metrics():
        known = dataclasses.asdict(metrics)
        total += (known.get("entire_frame_compile_time_s") or 0.0) - (known.get("backend_compile_time_s") or 0.0)
    return total


def torch_seconds() -> dict[str, float]:
    """Seconds of the longer phases that torch itself times in this process, nested ones counted in each."""
    totals = {name: sum(times) for name, times in compilation_time_metrics.items()}
    return {name: total for name, total in sorted(totals.items(), key=lambda row: -row[1]) if total > 0.1}


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each start."""
    found = results["starts"]
    lines = [f"{results['shape']}, {results['mode']}: seconds from the plain model to the first logits.", ""]
    lines += [f"| start | all | {' | '.join(PHASES)} |", f"|---{'|---:' * (len(PHASES) + 1)}|"]
    for name in STARTS:
        cells = " | ".join(f"{found[name]['phases'][phase]:.2f}" for phase in PHASES)
        lines.append(f"| {name} | {found[name]['seconds']:.2f} | {cells} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
