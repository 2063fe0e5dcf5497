"""Time of one step that computes whole prompts, contender by contender.

    python benchmarks/prefill.py --shape qwen3-0.6b [--cases 4x64 8x1024] [--contenders eager FULL ...] [--out FOLDER]

A case is requests x tokens of each. Where a contender's logits after the prompts are not those of the plain model,
prompt by prompt, it is recorded as wrong and not timed. transformers' contenders keep no cache, which favours them.
Exits 1, after writing its record, when any contender is wrong or fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import contenders as lib
from benchmarks.record import RESULTS, write
from benchmarks.shapes import SHAPES, build
from piecewise_backend.bench.engine_loop import EngineSettings
from piecewise_backend.bench.logits import compare, expected_logits, make_prompts

LARGEST_CAPTURE = 512


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(arguments.shape, device)
    bench = Bench(arguments, model)
    results: dict[str, Any] = {"shape": arguments.shape, "dtype": str(model.dtype), "contenders": {}}

    def save() -> None:
        add_ratios(results["contenders"])
        path = write(f"prefill_{arguments.shape}", results, arguments.out)
        path.with_suffix(".md").write_text(table(results))

    workshop = lib.Workshop(model, bench.settings)
    wanted = lib.names(arguments.contenders, arguments.backends)
    lib.run_each(workshop, wanted, bench.measure, results["contenders"], save)
    print(table(results))
    return 0 if lib.all_right(results["contenders"]) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--cases", nargs="+", type=case, default=[(4, 64), (8, 1024)], metavar="REQUESTSxTOKENS")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--capture-sizes", nargs="+", type=int, help="default: tokens of the cases, as far as up to 512"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    lib.add_arguments(parser)
    parser.set_defaults(contenders=["eager", "inductor", *lib.MODES])
    return parser.parse_args(argv)


def case(text: str) -> tuple[int, int]:
    num_reqs, length = text.split("x")
    return int(num_reqs), int(length)


class Bench:
    """What is the same for every contender."""

    def __init__(self, arguments: argparse.Namespace, model: Any) -> None:
        self.repeats = arguments.repeats
        totals = [num_reqs * length for num_reqs, length in arguments.cases]
        sizes = arguments.capture_sizes or [t for t in totals if t <= LARGEST_CAPTURE] or [1]
        self.settings = EngineSettings(
            options=lib.engine_options(arguments, sizes),
            max_num_reqs=max(num_reqs for num_reqs, _ in arguments.cases),
            max_model_len=max(length for _, length in arguments.cases) + 1,
            chunk=max(totals),
        )
        self.cases: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for num_reqs, length in arguments.cases:
            prompts = make_prompts(num_reqs, length, model.config.vocab_size, seed=3)
            alone = [expected_logits(model, prompts[r : r + 1], length) for r in range(num_reqs)]
            self.cases[f"{num_reqs}x{length}"] = prompts, torch.cat(alone)[:, 0]

    def measure(self, contender: lib.Contender, record: dict[str, Any], save: Callable[[], None]) -> None:
        cases = record.setdefault("cases", {})
        for name, (prompts, expected) in self.cases.items():
            before = contender.facts()
            step = contender.prefill_step(prompts)
            check = compare(step(), expected)
            cases[name] = {"check": check}
            if check["passed"]:
                cases[name] |= time_prefill(step, self.repeats)
                cases[name]["tokens_per_second"] = prompts.numel() / cases[name]["median_ms"] * 1e3
            record["facts"] = after = contender.facts()
            cases[name] |= {n: after[n] - before[n] for n in ("replays", "runs_without_graphs") if n in after}
            print(
                f"{name}: " + (f"{cases[name]['median_ms']:.2f} ms" if check["passed"] else f"WRONG: {check}"),
                flush=True,
            )
            save()


def time_prefill(step: Callable[[], torch.Tensor], repeats: int) -> dict[str, float]:
    """Milliseconds from the call to the device being through."""
    times = []
    for _ in range(2 + repeats):
        lib.synchronize()
        started = time.perf_counter()
        step()
        lib.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return {"median_ms": statistics.median(times[2:]), "best_ms": min(times[2:])}


def add_ratios(contenders: dict[str, Any]) -> None:
    """To eager: of contenders whose output was right, and only where eager's was."""
    eager = contenders.get("eager", {}).get("cases", {})
    for record in contenders.values():
        for name, found in record.get("cases", {}).items():
            if "median_ms" in found and "median_ms" in eager.get(name, {}):
                found["speed_up_over_eager"] = eager[name]["median_ms"] / found["median_ms"]


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each contender, a column for each case."""
    contenders = results["contenders"]
    cases = list(dict.fromkeys(name for record in contenders.values() for name in record.get("cases", {})))
    lines = [f"{results['shape']}, {results['dtype']}: ms of one prefill step (times as fast as eager).", ""]
    lines += [f"| contender | {' | '.join(cases)} |", f"|---{'|---:' * len(cases)}|"]
    for name, record in contenders.items():
        cells = [_cell(record, case) for case in cases]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(record: dict[str, Any], case: str) -> str:
    found = record.get("cases", {}).get(case)
    if found is None:
        return "skipped" if "skipped" in record else "failed" if "error" in record else ""
    if not found["check"]["passed"]:
        return "wrong"
    ratio = f" ({found['speed_up_over_eager']:.2f}×)" if "speed_up_over_eager" in found else ""
    return f"{found['median_ms']:.2f}{ratio}"


if __name__ == "__main__":
    sys.exit(main())
