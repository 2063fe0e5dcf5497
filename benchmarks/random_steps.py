"""Graphs change nothing: a hybrid model over hundreds of random steps, and guessing ahead with a real model.

    python benchmarks/random_steps.py [--steps 300] [--model smollm2] [--out FOLDER]

The hybrid model has attention, linear attention, short convolutions and compressed attention; requests come, go and
are preempted at random, and each mode's tokens and caches are compared with those of a run without graphs. Then greedy
generation with guesses is compared with plain greedy generation. Exits 1, after writing its record, when any differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from attention.huggingface import first_layers, load
from benchmarks.record import RESULTS, write
from benchmarks.smoke import make_prompts
from piecewise_backend.reporting.report import Report
from piecewise_backend.runner import LLM, DraftModel, PromptLookup, SamplingParams, Speculator
from tests.hybrid import all_caches, make_hybrid_runner, random_steps

MODES = ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    settings = {"device": "cuda", "recorder": "cuda", "compiler": "inductor"} if on_gpu else {}
    results = {"steps": arguments.steps, "hybrid": run_hybrid(arguments.steps, settings)}
    results["speculation"] = run_speculation(arguments.model, "cuda" if on_gpu else "cpu")
    path = write(f"random_steps_{'h200' if on_gpu else 'cpu'}", results, arguments.out)
    print(path.read_text())
    right = all(r["tokens_equal"] for part in ("hybrid", "speculation") for r in results[part].values())
    print("all tokens equal" if right else "TOKENS DIFFER")
    return 0 if right else 1


def run_hybrid(steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    runner = make_hybrid_runner("NONE", num_blocks=12, **settings)
    tokens, caches = random_steps(runner, steps), all_caches(runner)
    found = {}
    for mode in MODES:
        runner = make_hybrid_runner(mode, num_blocks=12, **settings)
        got = random_steps(runner, steps)
        pairs = [(cache, caches[name]) for name, cache in all_caches(runner).items()]
        found[mode] = {
            "tokens_equal": got == tokens,
            "requests": len(got),
            "caches": len(pairs),
            "caches_equal_in_all_bytes": sum(torch.equal(a, b) for a, b in pairs),
            "largest_cache_difference": max(float((a - b).abs().max()) for a, b in pairs),
            **summary(runner.report),
        }
    return found


def run_speculation(model: str, device: str) -> dict[str, Any]:
    loaded = load(model, dtype=torch.float32, device=device)
    prompts, params = make_prompts(loaded.tokenizer), SamplingParams(max_tokens=32)

    def generate(mode: str, speculator: Speculator | None) -> tuple[list[list[int]], LLM]:
        options = {"recorder": "cuda" if device == "cuda" else "emulated", "capture_sizes": [1, 4, 16, 64]}
        limits = {"max_num_tokens": 64, "max_num_reqs": 16, "max_model_len": 256}
        llm = LLM(loaded.model, mode=mode, device=device, options=options, speculator=speculator, **limits)
        return [c.token_ids for c in llm.generate(prompts, params)], llm

    plain, _ = generate("NONE", None)
    found = {}
    for mode in ("PIECEWISE", "FULL", "FULL_AND_PIECEWISE"):
        for name in ("prompt lookup", "first 6 layers"):
            speculator = PromptLookup(3) if name == "prompt lookup" else DraftModel(first_layers(loaded.model, 6), 3)
            got, llm = generate(mode, speculator)
            spec = speculator.report
            found[f"{name}, {mode}"] = {
                "tokens_equal": got == plain,
                "proposed": spec.proposed,
                "accepted": spec.accepted,
                "acceptance_rate": round(spec.acceptance_rate, 4),
                **summary(llm.report),
                "draft": summary(llm.report.draft) if llm.report.draft is not None else None,
            }
    return found


def summary(report: Report) -> dict[str, Any]:
    """Modes used and what was replayed."""
    used: dict[str, int] = {}
    for size in report.sizes:
        kind = size.descriptor.split(",")[0]
        used[kind] = used.get(kind, 0) + size.replays
    return {
        "resolved": report.mode_resolved,
        "captures": report.num_captures,
        "replays": used,
        "runs_without_graphs": report.uncaptured_runs,
    }


if __name__ == "__main__":
    sys.exit(main())
