"""Does it work on this machine? A real model in every mode, and plain callers, each compared with eager.

    python benchmarks/smoke.py [--model smollm2] [--out FOLDER]

Exits 1, after writing its record, when any output differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from transformers.generation.configuration_utils import CompileConfig

from attention.huggingface import PagedCausalLM, _locate, load
from benchmarks.record import RESULTS, write
from piecewise_backend.backend import mrv2, reports, reset
from piecewise_backend.runner import LLM, SamplingParams

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")
LENGTHS = (1, 2, 3, 5, 8, 16, 17, 31, 33, 48, 64, 65, 100, 128, 150, 200)
TEXT = "The history of mathematics deals with the origin of discoveries and the mathematical methods of the past. " * 20
NEW_TOKENS = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    device, recorder = ("cuda", "cuda") if on_gpu else ("cpu", "emulated")

    loaded = load(arguments.model, dtype=torch.float32, device=device)
    folder, kwargs = _locate(arguments.model)
    eager = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).to(device).eval()
    prompts = make_prompts(loaded.tokenizer)
    expected, seconds = greedy(eager, prompts, device)
    results: dict[str, Any] = {"model": arguments.model, "dtype": "float32", "eager_seconds": seconds, "engine": {}}
    for mode in MODES:
        results["engine"][mode] = run_engine(loaded.model, prompts, expected, mode, device, recorder)
    results["static_cache"] = run_static_cache(eager, prompts[10], device, recorder)
    path = write(f"smoke_{'h200' if on_gpu else 'cpu'}", results, arguments.out)
    right = all(r["equal"] for r in (*results["engine"].values(), *results["static_cache"].values()))
    print(path.read_text())
    print("all outputs equal eager" if right else "OUTPUTS DIFFER")
    return 0 if right else 1


def make_prompts(tokenizer: Any) -> list[list[int]]:
    rng = random.Random(0)
    tokens = tokenizer(TEXT)["input_ids"]
    return [tokens[(start := rng.randrange(50)) : start + n] for n in LENGTHS]


@torch.no_grad()
def greedy(model: Any, prompts: list[list[int]], device: str) -> tuple[list[list[int]], float]:
    """What `generate` gives for each prompt alone."""
    started = time.perf_counter()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        found.append(output[0, len(prompt) :].tolist())
    return found, time.perf_counter() - started


def run_engine(
    model: PagedCausalLM, prompts: list[list[int]], expected: list[list[int]], mode: str, device: str, recorder: str
) -> dict[str, Any]:
    started = time.perf_counter()
    llm = LLM(
        model,
        mode=mode,
        device=device,
        options={"recorder": recorder, "capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
        max_num_tokens=64,
        max_num_reqs=16,
        max_model_len=256,
    )
    ready = time.perf_counter()
    completions = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
    report = llm.report
    return {
        "equal": [c.token_ids for c in completions] == expected,
        "resolved": report.mode_resolved,
        "backends": sorted({group.backend.name for group in llm.runner.groups}),
        "start_seconds": ready - started,
        "generate_seconds": time.perf_counter() - ready,
        "pieces": report.num_pieces,
        "distinct_compiles": len(report.compiled),
        "captures": report.num_captures,
        "capture_seconds": sum(s.seconds for s in report.sizes),
        "replays": report.num_replays,
        "runs_without_graphs": report.uncaptured_runs,
        "reasons": [f"{reason.code}: {reason} (x{count})" for reason, count in report.reasons],
    }


def run_static_cache(model: Any, prompt: list[int], device: str, recorder: str) -> dict[str, Any]:
    """transformers' own generation with a static cache, compiled with mrv2 in both ways it offers."""
    expected = greedy(model, [prompt], device)[0][0]
    options = {"recorder": recorder}
    config = CompileConfig(backend=mrv2, mode=None, options=options)
    config._compile_all_devices = True
    by_config = _static_generate(model, prompt, expected, device, compile_config=config)
    plain = model.forward
    model.forward = torch.compile(model.forward, backend=mrv2, options=options)
    by_forward = _static_generate(model, prompt, expected, device)
    model.forward = plain
    return {"compile_config": by_config, "compiled_forward": by_forward}


@torch.no_grad()
def _static_generate(model: Any, prompt: list[int], expected: list[int], device: str, **kwargs: Any) -> dict[str, Any]:
    reset()
    ids = torch.tensor([prompt], device=device)
    equal = True
    for _ in range(2):
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            cache_implementation="static",
            **kwargs,
        )
        equal &= output[0, len(prompt) :].tolist() == expected
    found = reports()
    return {
        "equal": equal,
        "replays": sum(r.num_replays for r in found),
        "captures": sum(r.num_captures for r in found),
        "reasons": [f"{reason.code}: {reason} (x{count})" for r in found for reason, count in r.reasons],
    }


if __name__ == "__main__":
    sys.exit(main())
