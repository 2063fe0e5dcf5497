"""Random models on this machine's device, against eager and against their own code without graphs; keeps a record.

    python benchmarks/random_models.py [--models 200] [--workers 8] [--compiler eager] [--out FOLDER]

On a GPU real graphs are recorded. What is compared is said in tests/fuzz/differential.py. Exits 1, after writing the
record, when any model failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.record import RESULTS, write

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--seed", type=int, default=10_000, help="the first model's; the others follow")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--compiler", choices=("eager", "aot_eager", "inductor"), default="eager")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device, started = "cuda" if torch.cuda.is_available() else "cpu", time.perf_counter()
    share = -(-arguments.models // arguments.workers)
    runs = [
        start(arguments.seed + first, min(share, arguments.models - first), arguments.compiler, device)
        for first in range(0, arguments.models, share)
    ]
    outputs = [run.communicate()[0] for run in runs]
    events: Counter[str] = Counter()
    for output in outputs:
        events += events_in(output)
    codes = [run.returncode for run in runs]
    results: dict[str, Any] = {
        "device": device,
        "models": arguments.models,
        "first_seed": arguments.seed,
        "compiler": arguments.compiler,
        "events": dict(sorted(events.items())),
        "exit_codes": codes,
        "failures": [output[-4000:] for output, code in zip(outputs, codes, strict=True) if code],
        "seconds": time.perf_counter() - started,
    }
    print(write(f"random_models_{device}", results, arguments.out).read_text())
    return 0 if not any(codes) and events["models"] else 1


def start(seed: int, models: int, compiler: str, device: str) -> subprocess.Popen[str]:
    options = ["--seed", str(seed), "--models", str(models), "--compiler", compiler, "--device", device]
    command = [sys.executable, "-m", "tests.fuzz.differential", "--keep-going", *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def events_in(output: str) -> Counter[str]:
    """From the line that sums up a run: "name: count, name: count, ..."."""
    pairs = re.compile(r"^(?:[\w ]+: \d+(?:, |$))+$")
    lines = [line for line in output.splitlines() if pairs.match(line)]
    found: Counter[str] = Counter()
    for name, count in re.findall(r"([\w ]+): (\d+)", lines[-1] if lines else ""):
        found[name.strip()] += int(count)
    return found


if __name__ == "__main__":
    sys.exit(main())
