"""Time per output token, contender by contender, beside the floor that memory sets.

    python benchmarks/decode.py --shape qwen3-0.6b [--contenders eager FULL ...] [--batches 1 8 32 128] [--out FOLDER]

In each batch size a contender first computes 32 tokens of other prompts, the last ones one by one; where its logits
are not those of the plain model it is recorded as wrong and not timed. Then prompts of random tokens are computed,
untimed, so that the timed steps have `--context` tokens on average. The figure is the time of all steps, synchronised
at both ends, over their number. transformers' loops choose tokens on the device and never wait for them, which favours
them. Exits 1, after writing its record, when any contender is wrong or fails.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import contenders as lib
from benchmarks.decode_table import REFERENCE, table
from benchmarks.floor import copy_rate, floors_ms
from benchmarks.kernel_times import profile_steps
from benchmarks.record import RESULTS, write
from benchmarks.shapes import SHAPES, build
from piecewise_backend.bench.engine_loop import EngineLoop, EngineSettings, prefill_steps
from piecewise_backend.bench.logits import CHECK_PREFILL, CHECK_TOKENS, compare, expected_logits, make_prompts

PROFILED_STEPS = 5


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rate = copy_rate(device)
    model = build(arguments.shape, device)
    bench = Bench(arguments, model)
    results: dict[str, Any] = {
        "shape": arguments.shape,
        "dtype": str(model.dtype),
        "context": arguments.context,
        "steps": arguments.steps,
        "copy_gb_per_s": rate / 1e9,
        "floor_ms": floors_ms(model, arguments.batches, arguments.context, rate),
        "contenders": {},
        "reference": REFERENCE.get(arguments.shape, {}),
    }
    workshop = lib.Workshop(model, bench.settings)
    wanted = lib.names(arguments.contenders, arguments.backends)
    lib.run_each(workshop, wanted, bench.measure, results["contenders"], lambda: save(results, arguments.out))
    print(table(results))
    return 0 if lib.all_right(results["contenders"]) else 1


def save(results: dict[str, Any], folder: Path) -> None:
    """What is known so far."""
    add_ratios(results)
    path = write(f"decode_{results['shape']}", results, folder)
    path.with_suffix(".md").write_text(table(results))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64, help="timed steps")
    parser.add_argument("--warmup", type=int, default=8, help="steps before the timed ones")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of one step while prompts are computed")
    parser.add_argument("--capture-sizes", nargs="+", type=int, help="default: the batches")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write tables of the engine's kernels there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    lib.add_arguments(parser)
    return parser.parse_args(argv)


class Bench:
    """What is the same for every contender: prompts, expected logits, limits."""

    def __init__(self, arguments: argparse.Namespace, model: Any) -> None:
        self.arguments = arguments
        self.vocab_size = model.config.vocab_size
        self.new_tokens = arguments.warmup + arguments.steps + PROFILED_STEPS
        self.prompt_len = arguments.context - arguments.warmup - arguments.steps // 2
        largest = max(arguments.batches)
        chunk = max(arguments.chunk, largest, CHECK_TOKENS)
        spare = prefill_steps(largest, self.prompt_len, chunk)
        self.max_len = self.prompt_len + self.new_tokens + spare + 1
        self.settings = EngineSettings(
            options=lib.engine_options(arguments, arguments.capture_sizes or arguments.batches),
            max_num_reqs=largest,
            max_model_len=self.max_len,
            chunk=chunk,
        )
        self.check_prompts = make_prompts(largest, CHECK_TOKENS, self.vocab_size, seed=1)
        self.expected = expected_logits(model, self.check_prompts, CHECK_PREFILL)

    def measure(self, contender: lib.Contender, record: dict[str, Any], save: Callable[[], None]) -> None:
        batches = record.setdefault("batches", {})
        for num_reqs in self.arguments.batches:
            batches[str(num_reqs)] = found = self.measure_batch(contender, num_reqs)
            record["facts"] = contender.facts()
            shown = f"{found['ms_per_token']:.3f} ms" if found["check"]["passed"] else f"WRONG: {found['check']}"
            print(f"batch {num_reqs}: {shown}", flush=True)
            save()

    def measure_batch(self, contender: lib.Contender, num_reqs: int) -> dict[str, Any]:
        max_len = self.prompt_len + self.new_tokens + 1
        contender.begin(num_reqs, max_len)
        check = compare(contender.forced_logits(self.check_prompts[:num_reqs], CHECK_PREFILL), self.expected[:num_reqs])
        if not check["passed"]:
            return {"check": check}
        started = time.perf_counter()
        contender.prefill(make_prompts(num_reqs, self.prompt_len, self.vocab_size, seed=2), self.new_tokens)
        lib.synchronize()
        found = {"check": check, "prefill_seconds": time.perf_counter() - started}
        found |= time_steps(contender, num_reqs, self.arguments.warmup, self.arguments.steps)
        if self.arguments.profile is not None and isinstance(contender, EngineLoop):
            name = f"kernels_{self.arguments.shape}_{contender.name.replace(' ', '_')}_batch{num_reqs}"
            profile_steps(contender.step, PROFILED_STEPS, name, self.arguments.profile)
        contender.finish()
        return found


def time_steps(contender: lib.Contender, num_reqs: int, warmup: int, steps: int) -> dict[str, float]:
    """Milliseconds of one step for all requests: the whole interval over its steps, and how single steps spread."""
    for _ in range(warmup):
        contender.step()
    before = contender.facts()
    lib.synchronize()
    times, tokens = [time.perf_counter()], 0
    for _ in range(steps):
        tokens += contender.step()
        times.append(time.perf_counter())
    lib.synchronize()
    interval = time.perf_counter() - times[0]
    if tokens != steps * num_reqs:
        raise RuntimeError(f"{steps} steps of {num_reqs} requests gave {tokens} tokens: not the steady state")
    each = [(end - start) * 1e3 for start, end in itertools.pairwise(times)]
    after = contender.facts()
    return {
        "ms_per_token": interval / steps * 1e3,
        "host_median_ms": statistics.median(each),
        "host_p90_ms": statistics.quantiles(each, n=10)[-1],
        **{name: after[name] - before[name] for name in ("replays", "runs_without_graphs") if name in after},
    }


def add_ratios(results: dict[str, Any]) -> None:
    """To the floor, and to eager: of contenders whose output was right, and only where eager's was."""
    eager = results["contenders"].get("eager", {}).get("batches", {})
    for record in results["contenders"].values():
        for batch, found in record.get("batches", {}).items():
            if not found["check"]["passed"]:
                continue
            found["ratio_to_floor"] = found["ms_per_token"] / results["floor_ms"][batch]
            if "ms_per_token" in eager.get(batch, {}):
                found["speed_up_over_eager"] = eager[batch]["ms_per_token"] / found["ms_per_token"]


if __name__ == "__main__":
    sys.exit(main())
