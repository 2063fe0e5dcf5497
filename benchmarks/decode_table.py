"""The record of `decode.py` as a table; and figures of others to read beside it."""

from __future__ import annotations

from typing import Any

# Milliseconds per output token for batches 1, 8, 32, 128 (as far as known) at a context of 1024, measured on one NVIDIA
# H200 with PyTorch 2.11, in other runs than the record's. A pair is the range of several runs.
REFERENCE: dict[str, dict[str, list[Any]]] = {
    "qwen3-0.6b": {
        "floor": [0.31, 0.52, 1.24, 4.09],
        "vLLM 0.24 FULL": [1.78, [1.75, 2.04], 2.61, 5.85],
        "vLLM 0.24 PIECEWISE": [5.4, 6.5, 5.2, 11.5],
        "transformers, static cache, reduce-overhead": [3.12, 4.98],
    },
    "llama-3.1-8b": {
        "floor": [3.61, 3.85, 4.66, 7.92],
        "vLLM 0.24 FULL": [4.98, 5.28, 6.30, 10.8],
        "vLLM 0.24 PIECEWISE": [4.99, 5.27, 6.28, 10.8],
        "transformers, static cache, reduce-overhead": [7.66],
    },
}
REFERENCE_BATCHES = (1, 8, 32, 128)


def table(results: dict[str, Any]) -> str:
    """Markdown: a row for each contender, a column for each batch; the ratio to the floor in brackets."""
    batches = list(results["floor_ms"])
    lines = [
        f"{results['shape']}, {results['dtype']}, context {results['context']}: ms per output token (times the floor). "
        f"Memory copies at {results['copy_gb_per_s']:.0f} GB/s.",
        "",
        f"| contender | {' | '.join(f'batch {batch}' for batch in batches)} |",
        f"|---{'|---:' * len(batches)}|",
        _row("memory floor", [f"{ms:.2f}" for ms in results["floor_ms"].values()]),
    ]
    for name, record in results["contenders"].items():
        lines.append(_row(name, [_cell(record, batch) for batch in batches]))
    for name, figures in results["reference"].items():
        by_batch = {str(batch): _figure(ms) for batch, ms in zip(REFERENCE_BATCHES, figures, strict=False)}
        lines.append(_row(f"*elsewhere:* {name}", [by_batch.get(batch, "") for batch in batches]))
    notes = [f"- {name}: {why}" for name, record in results["contenders"].items() if (why := _note(record))]
    return "\n".join([*lines, "", *notes, ""] if notes else [*lines, ""])


def _row(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _cell(record: dict[str, Any], batch: str) -> str:
    found = record.get("batches", {}).get(batch)
    if found is None:
        return "skipped" if "skipped" in record else "failed" if "error" in record else ""
    if not found["check"]["passed"]:
        return "wrong"
    return f"{found['ms_per_token']:.2f} ({found['ratio_to_floor']:.1f}×)"


def _figure(ms: float | list[float]) -> str:
    return f"{ms:.2f}" if isinstance(ms, int | float) else " to ".join(f"{bound:.2f}" for bound in ms)


def _note(record: dict[str, Any]) -> str:
    return record.get("skipped") or record.get("error", "").partition("\n")[0]
