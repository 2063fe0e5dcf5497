"""Results with their conditions, in the folder of this repository's records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from piecewise_backend.bench import record

RESULTS = Path(__file__).parent / "results"


def write(name: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write `results` with their conditions to `<folder>/<name>.json`."""
    return record.write(name, results, folder)
