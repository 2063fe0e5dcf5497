"""Run every test that needs a GPU and keep a record of how it went.

    python benchmarks/gpu_tests.py [--out FOLDER] [--name gpu_tests] [--workers N] [pytest arguments ...]

With `--workers`, tests that must have the GPU to themselves run after the others. Exits 1, after writing the record,
unless all passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import RESULTS, write

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="gpu_tests")
    parser.add_argument("--workers", type=int, default=1)
    arguments, rest = parser.parse_known_args()
    started, reports, codes = time.perf_counter(), [], []
    parallel = ["-n", str(arguments.workers), "--dist", "load"] if arguments.workers > 1 else []
    for marks, extra in (("gpu and not alone", parallel), ("gpu and alone", [])):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "junit.xml")
            command = [sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={report}"]
            codes.append(subprocess.run([*command, *extra, *(rest or ["tests/gpu"])], cwd=ROOT, check=False).returncode)
            reports.append(ElementTree.parse(report))
    results = summarise([case for report in reports for case in report.iter("testcase")])
    results |= {"pytest_exit_codes": codes, "seconds": time.perf_counter() - started}
    path = write(arguments.name, results, arguments.out)
    print(path.read_text())
    return 0 if results["outcomes"].keys() == {"passed"} else 1


def summarise(cases: list[Any]) -> dict[str, Any]:
    """Counts by file and outcome, and the names of tests that failed."""
    by_file: dict[str, dict[str, int]] = {}
    failed: list[str] = []
    for case in cases:
        outcomes = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = next(iter(outcomes), "passed")
        counts = by_file.setdefault(case.get("classname", "?"), {})
        counts[outcome] = counts.get(outcome, 0) + 1
        if outcome in ("failure", "error"):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    totals: dict[str, int] = {}
    for counts in by_file.values():
        for outcome, count in counts.items():
            totals[outcome] = totals.get(outcome, 0) + count
    return {"tests": sum(totals.values()), "outcomes": totals, "by_file": by_file, "failed": failed}


if __name__ == "__main__":
    sys.exit(main())
