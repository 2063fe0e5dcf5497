"""Run tests of every kernel of ours under NVIDIA's compute-sanitizer and keep a record of what it found.

    python benchmarks/sanitize.py [--tool memcheck] [--workers 8] [--limit-s 300] [--out FOLDER]

Of each test function of the kernels' files the first and the last case are run, without PyTorch's caching allocator,
so that each tensor has bounds of its own. Exits 1, after writing the record, unless all passed and nothing was found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import RESULTS, write

ROOT = Path(__file__).resolve().parents[1]
FILES = ("test_backends.py", "test_like_ops.py", "test_linear_attention.py", "test_linear.py")
# Of gigabytes, or of thousands of launches, each of which takes milliseconds here; and what records graphs, whose
# memory only the caching allocator can hand out.
LEFT_OUT = ("two_to_the_31", "thousand", "random_chunks", "14336", "6144", "recorded", "others", "whichever_split")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=("memcheck", "racecheck", "synccheck", "initcheck"), default="memcheck")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--limit-s", type=float, default=300)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    tests, started = sample(collected()), time.perf_counter()
    shares = [share for worker in range(arguments.workers) if (share := tests[worker :: arguments.workers])]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{number}.txt") for number in range(len(shares))]
        runs = [start(sanitizer, arguments.tool, share, log) for share, log in zip(shares, logs, strict=True)]
        results = [outcome(run, log, started + arguments.limit_s) for run, log in zip(runs, logs, strict=True)]
    record: dict[str, Any] = {
        "tool": arguments.tool,
        "tests": len(tests),
        "passed": sum(found["passed"] for found in results),
        "errors_found": sum(found["errors"] for found in results),
        "processes_without_summary": sum(not found["has_summary"] for found in results),
        "seconds": time.perf_counter() - started,
        "names": tests,
        "trouble": [found["tail"] for found in results if found["errors"] or not found["has_summary"]],
    }
    print(write(f"sanitizer_{arguments.tool}", record, arguments.out).read_text())
    clean = record["passed"] == len(tests) and not record["errors_found"] and not record["processes_without_summary"]
    return 0 if clean else 1


def collected() -> list[str]:
    """Names of the kernels' tests."""
    files = [f"tests/gpu/{name}" for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not alone", "--collect-only", *files]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in run.stdout.splitlines() if "::" in line]


def sample(names: list[str]) -> list[str]:
    """The first and the last case of each function."""
    cases: dict[str, list[str]] = {}
    for name in names:
        if not any(part in name for part in LEFT_OUT):
            cases.setdefault(name.partition("[")[0], []).append(name)
    return [name for found in cases.values() for name in dict.fromkeys((found[0], found[-1]))]


def start(sanitizer: str, tool: str, tests: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [
        sanitizer,
        "--tool",
        tool,
        "--target-processes",
        "all",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
    ]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with open(log, "wb") as file:
        return subprocess.Popen([*command, *tests], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def outcome(run: subprocess.Popen[bytes], log: Path, deadline: float) -> dict[str, Any]:
    """Of one process, which is ended at `deadline`."""
    try:
        run.wait(timeout=max(1.0, deadline - time.perf_counter()))
    except subprocess.TimeoutExpired:
        run.kill()
        run.wait()
    text = log.read_text(errors="replace")
    passed, errors = re.search(r"(\d+) passed", text), re.findall(r"ERROR SUMMARY: (\d+) error", text)
    return {
        "passed": int(passed[1]) if passed else 0,
        "errors": sum(map(int, errors)),
        "has_summary": bool(errors),
        "tail": text[-3000:],
    }


if __name__ == "__main__":
    sys.exit(main())
