"""The report on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_MARKS = {"recorded": ("●", "green"), "eager": ("○", "yellow"), "never captured": ("×", "red")}
"""Shape and colour of each fate: none is told by its colour alone."""


def render(facts: dict[str, Any], summary: Sequence[tuple[str, str]]) -> Group:
    """`facts` as `as_dict` makes them, under the lines of `summary`."""
    return Group(*_parts(facts, summary))


def _parts(facts: dict[str, Any], summary: Sequence[tuple[str, str]]) -> Iterator[RenderableType]:
    lines = Table.grid(padding=(0, 2))
    for label, value in summary:
        lines.add_row(Text(label, style="bold"), Text(value))
    yield Text(f"mrv2 report: {facts['name']}", style="bold cyan")
    yield lines
    if facts["program"]["steps"]:
        yield _program(facts)
    if facts["groups"]:
        yield _groups(facts["groups"])
    captures = [c for c in facts["captures"] if not c["dropped"]]
    if captures:
        yield _captures(captures)
    if facts["fallbacks"]:
        yield _reasons(facts["fallbacks"])
    if facts["others"]:
        yield Text(f"{len(facts['others'])} more graph(s) of this function: report.others", style="dim")


def _program(facts: dict[str, Any]) -> Table:
    """The folded row: one line for each distinct step of a run."""
    steps, kinds = facts["program"]["steps"], [kind["name"] for kind in facts["kinds"]]
    table = _table("program", "steps", "times", "what", "source", *kinds, "why not recorded")
    pieces = {piece["structure"]: piece for piece in facts["pieces"]}
    for row in facts["program"]["rows"]:
        for indices in row["steps"]:
            step = steps[indices[0]]
            piece = pieces.get(step["structure"])
            what = step["name"].rpartition(" ")[0] if step["is_breakpoint"] else _operators(piece)
            fates = [step["fates"][kind] for kind in kinds]
            whys = "; ".join(dict.fromkeys(f["why"] for f in fates if f["why"]))
            cells = [_indices(indices), f"x {len(indices)}", what, piece["source"] if piece else "", whys]
            table.add_row(*map(Text, cells[:4]), *[_mark(f["fate"]) for f in fates], Text(cells[4]))
    return table


def _mark(fate: str) -> Text:
    shape, colour = _MARKS[fate]
    return Text(f"{shape} {fate}", style=colour)


def _indices(indices: Sequence[int]) -> str:
    if len(indices) <= 3:
        return ", ".join(map(str, indices))
    return f"{indices[0]}, {indices[1]} .. {indices[-1]}"


def _operators(piece: dict[str, Any] | None) -> str:
    names = [one["operator"] for one in piece["launches"]] if piece else []
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "") if names else "views"


def _groups(groups: list[dict[str, Any]]) -> Table:
    table = _table("attention groups", "backend", "layers", "support", "place", "decode", "mixed")
    for g in groups:
        place = "in pieces" if g["in_piece"] else "breakpoint"
        table.add_row(g["backend"], str(g["num_layers"]), g["support"], place, g["decode"], g["mixed"])
    return table


def _captures(captures: list[dict[str, Any]]) -> Table:
    table = Table(title="captured", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in ("variant", "graphs", "eager", "capture", "memory", "replays", "padding"):
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    for c in captures:
        waste = "-" if c["padding_waste"] is None else f"{c['padding_waste']:.0%}"
        table.add_row(
            c["descriptor"],
            str(c["num_graphs"]),
            str(len(c["eager_ops"])),
            f"{c['seconds'] * 1e3:.0f} ms",
            f"{c['memory_bytes'] / 2**20:.2f} MiB",
            str(c["replays"]),
            waste,
        )
    return table


def _reasons(fallbacks: list[dict[str, Any]]) -> Table:
    table = _table("what went another way", "times", "code", "what", "way out")
    for group in fallbacks:
        for reason in group["reasons"]:
            what = Text(f"{reason['subject']}: {reason['detail']}")
            table.add_row(str(reason["times"]), group["code"], what, Text(reason["hint"]))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column)
    return table
