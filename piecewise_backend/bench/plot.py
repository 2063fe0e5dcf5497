"""Bars of milliseconds, a panel for each case. Needs matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PLAIN, OWN = "#9a9a9a", "#2f6db5"


def why_no_plot() -> str | None:
    """Why nothing can be drawn here; None where it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install matplotlib, or 'mrv2[notebooks]')"
    return None


def new_panels(count: int, num_bars: int, *, width: tuple[float, float] = (2.2, 3.1)) -> tuple[Any, Any]:
    """(figure, its `count` panels side by side), high enough for `num_bars` bars; width: of labels, and of a panel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 1.6 + 0.3 * num_bars
    figure, panels = pyplot.subplots(
        1, count, figsize=(width[0] + width[1] * count, height), sharey=True, squeeze=False, layout="constrained"
    )
    return figure, panels[0]


def draw_bars(panel: Any, times: Mapping[str, float], colors: Mapping[str, str], title: str, line: float = 0.0) -> None:
    """Horizontal bars with their values, in ms (0: none); a dashed `line` where it is not 0."""
    labels = list(times)
    panel.barh(labels, list(times.values()), color=[colors[label] for label in labels], height=0.72)
    if line:
        panel.axvline(line, color="black", linestyle="--", linewidth=1)
    longest = max([*times.values(), line])
    for row, ms in enumerate(times.values()):
        if ms:
            panel.text(ms + longest * 0.02, row, f"{ms:.2f}", va="center", fontsize=8)
    panel.set_xlim(0, longest * 1.22)
    panel.set_title(title, fontsize=10)
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right"]].set_visible(False)
    if not panel.yaxis_inverted():  # the panels share it
        panel.invert_yaxis()


def save(figure: Any, out: Path) -> None:
    """Write and forget the figure."""
    from matplotlib import pyplot

    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=160)
    pyplot.close(figure)


def draw(results: dict[str, Any], out: Path) -> bool:
    """The medians of a run of `mrv2 bench`. False, and no file, where nothing was timed."""
    names = [n for n in _names(results) if any("median_ms" in r.get(n, {}) for r in results["cases"].values())]
    if not names:
        return False
    figure, panels = new_panels(len(results["cases"]), len(names))
    colors = {name: OWN if name.startswith("mrv2") else PLAIN for name in names}
    for panel, (case, records) in zip(panels, results["cases"].items(), strict=True):
        draw_bars(panel, {n: records.get(n, {}).get("median_ms", 0.0) for n in names}, colors, case)
    figure.suptitle(f"Milliseconds of one {results['unit']}: {results['target']}, {results['device']}")
    save(figure, out)
    return True


def _names(results: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for records in results["cases"].values() for name in records))
