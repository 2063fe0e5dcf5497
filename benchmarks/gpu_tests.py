"""Run every test that needs a GPU and keep a record of how it went.

    python benchmarks/gpu_tests.py [--out FOLDER] [pytest arguments ...]

Exits as pytest does, after writing the record.
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
    arguments, rest = parser.parse_known_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *(rest or ["tests/gpu"])]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        results = summarise(ElementTree.parse(report)) if report.exists() else {"error": "pytest wrote no report"}
    results |= {"pytest_exit_code": code, "seconds": time.perf_counter() - started}
    path = write("gpu_tests", results, arguments.out)
    print(path.read_text())
    return code


def summarise(report: Any) -> dict[str, Any]:
    """Counts by file and outcome, and the names of tests that failed."""
    by_file: dict[str, dict[str, int]] = {}
    failed: list[str] = []
    for case in report.iter("testcase"):
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
