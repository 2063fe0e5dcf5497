"""Records of `decode.py` as a picture: a panel for each batch, a bar for each contender, the memory floor as a line.

    python benchmarks/plot.py decode_qwen3-0.6b.json [more.json ...] [--leave-out eager] [--out FILE.png]

Several records of one shape are drawn as one; of a contender that is in more than one, the last counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decode_table import REFERENCE_BATCHES
from piecewise_backend.bench.plot import PLAIN, draw_bars, new_panels, save

ELSEWHERE = "#d2d2d2"
BACKENDS = {"triton": "#2f6db5", "flashinfer": "#1d9a7a", "torch": "#7a5ab5"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--leave-out", nargs="+", default=[], metavar="NAME", help="contenders, e.g. eager")
    parser.add_argument("--out", type=Path, help="default: beside the first record")
    arguments = parser.parse_args(argv)
    results = merge([json.loads(path.read_text()) for path in arguments.records])
    for name in arguments.leave_out:
        if results["contenders"].pop(name, None) is None:
            parser.error(f"no contender {name!r}; the records have {', '.join(results['contenders'])}")
    out = arguments.out or arguments.records[0].with_suffix(".png")
    draw(results, out)
    print(out)
    return 0


def merge(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record of them all. ValueError where they are of different models, lengths or machines."""
    first = records[0]
    merged = first | {"contenders": {}, "floor_ms": {}}
    for record in records:
        for fact in ("shape", "dtype", "context"):
            if record[fact] != first[fact]:
                raise ValueError(f"records differ in {fact}: {first[fact]!r} and {record[fact]!r}; draw them apart")
        if record["conditions"]["gpu"] != first["conditions"]["gpu"]:
            raise ValueError(f"records are of {first['conditions']['gpu']} and of {record['conditions']['gpu']}")
        merged["floor_ms"] |= record["floor_ms"]
        for name, found in record["contenders"].items():
            batches = merged["contenders"].setdefault(name, {"batches": {}})["batches"]
            batches |= found.get("batches", {})
    merged["floor_ms"] = dict(sorted(merged["floor_ms"].items(), key=lambda item: int(item[0])))
    return merged


def bars(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Label to batch to milliseconds; only right outputs have any. Figures of others come last."""
    found: dict[str, dict[str, float]] = {}
    for name, record in results["contenders"].items():
        times = {b: f["ms_per_token"] for b, f in record["batches"].items() if f["check"]["passed"]}
        if times:
            found[_label(name)] = times
    for name, figures in results["reference"].items():
        if name != "floor":
            pairs = zip(REFERENCE_BATCHES, figures, strict=False)
            found[f"{name} †"] = {str(b): ms if isinstance(ms, int | float) else sum(ms) / len(ms) for b, ms in pairs}
    return found


def draw(results: dict[str, Any], out: Path) -> None:
    """Write the picture."""
    found, floors = bars(results), results["floor_ms"]
    colors = {label: _color(label) for label in found}
    figure, panels = new_panels(len(floors), len(found), width=(3.4, 2.6))
    for panel, (batch, floor) in zip(panels, floors.items(), strict=True):
        times = {label: by_batch.get(batch, 0.0) for label, by_batch in found.items()}
        draw_bars(panel, times, colors, f"batch {batch} (floor {floor:.2f})", floor)
    gpu = results["conditions"]["gpu"] or "CPU"
    figure.suptitle(f"Milliseconds per output token: {results['shape']}, context {results['context']}, {gpu}")
    notes = "dashed: memory floor"
    if results["reference"]:
        notes += "      † measured elsewhere, on the same kind of GPU; ranges at their middle"
    figure.supxlabel(notes, fontsize=8, color="#555555")
    save(figure, out)


def _label(name: str) -> str:
    what, _, backend = name.partition(" ")
    return f"mrv2 {what}, {backend}" if backend else f"transformers {what}"


def _color(label: str) -> str:
    if label.endswith("†"):
        return ELSEWHERE
    return BACKENDS.get(label.rpartition(", ")[2], PLAIN)


if __name__ == "__main__":
    sys.exit(main())
