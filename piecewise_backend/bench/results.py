"""Records of a run: ratios to eager, and a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def add_ratios(cases: dict[str, dict[str, dict[str, Any]]], base: str = "eager") -> None:
    """`speed_up_over_<base>` for every contender with a time, in each case where `base` has one too."""
    for records in cases.values():
        first = records.get(base, {}).get("median_ms")
        for record in records.values():
            if first is not None and "median_ms" in record:
                record[f"speed_up_over_{base}"] = first / record["median_ms"]


def table(results: dict[str, Any]) -> Table:
    """For a terminal: a row for each contender, per case its median, spread and ratio."""
    shown = Table(
        title=f"{results['target']}: ms of one {results['unit']} on {results['device']}", title_justify="left"
    )
    shown.add_column("contender")
    for case in results["cases"]:
        shown.add_column(case, justify="right")
    for name in _contenders(results):
        shown.add_row(name, *(cell(records.get(name, {}), results["base"]) for records in results["cases"].values()))
    return shown


def markdown(results: dict[str, Any]) -> str:
    """The same for a file."""
    cases = list(results["cases"])
    lines = [f"{results['target']}: ms of one {results['unit']} on {results['device']} (p10 to p90; ratio to "]
    lines[0] += f"{results['base']}).\n"
    lines += [f"| contender | {' | '.join(cases)} |", f"|---{'|---:' * len(cases)}|"]
    for name in _contenders(results):
        cells = [cell(records.get(name, {}), results["base"]) for records in results["cases"].values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *[f"- {note}" for note in notes(results)], ""])


def cell(record: dict[str, Any], base: str) -> str:
    """ "1.23 (1.20 to 1.31, 2.0×)", or why there is no time."""
    if "median_ms" in record:
        spread = f"{record['p10_ms']:.3g} to {record['p90_ms']:.3g}"
        ratio = f", {record[key]:.2f}×" if (key := f"speed_up_over_{base}") in record else ""
        return f"{record['median_ms']:.3g} ({spread}{ratio})"
    for word in ("skipped", "error", "emulated"):
        if word in record and record.get("check", {}).get("passed", True):
            return {"skipped": "skipped", "error": "failed", "emulated": "right, not timed"}[word]
    return "WRONG" if "check" in record else ""


def notes(results: dict[str, Any]) -> list[str]:
    """Why some have no time, or not that of graphs; once for each contender and reason."""
    found: dict[str, None] = {}
    for records in results["cases"].values():
        for name, record in records.items():
            why = record.get("skipped") or record.get("error") or _wrong(record) or record.get("emulated")
            if record.get("timed_calls_without_graphs") and name != "mrv2 NONE":
                why = f"{record['timed_calls_without_graphs']} timed calls ran without graphs; see the record's reasons"
            if why:
                found[f"{name}: {str(why).splitlines()[0]}"] = None
    return list(found)


def _wrong(record: dict[str, Any]) -> str:
    check = record.get("check", {"passed": True})
    return "" if check["passed"] else f"WRONG output, so it is not timed: {check.get('why', check)}"


def _contenders(results: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for records in results["cases"].values() for name in records))
