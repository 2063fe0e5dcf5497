"""The report as one HTML page that stands alone: no network, style and script inside it."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CppLexer, PythonLexer

from piecewise_backend.reporting.records import Fate

_FATES = {fate.value: fate.name.lower() for fate in Fate}
"""Class names of the fates: "recorded", "eager", "never"."""


def page(facts: dict[str, Any]) -> str:
    """The page of a report given as `as_dict` makes it; other graphs and a draft model are tabs of it."""
    graphs = list(_graphs(facts, "model"))
    template = _environment().get_template("page.html.jinja")
    return template.render(title=facts["name"], graphs=[{"label": label, **_view(g)} for label, g in graphs])


def frame(document: str) -> str:
    """`document` in a frame, to be part of another page."""
    source = html.escape(document, quote=True)
    style = "width:100%;height:680px;border:1px solid #8884;border-radius:8px"
    return f'<iframe title="mrv2 report" sandbox="allow-scripts" style="{style}" srcdoc="{source}"></iframe>'


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("piecewise_backend.reporting"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[[Any], str]] = {
        "seconds": in_seconds,
        "mib": lambda size: f"{size / 2**20:.2f} MiB",
        "percent": lambda share: "–" if share is None else f"{share:.0%}",
        "fate_class": _FATES.__getitem__,
        "indices": indices_in_words,
    }
    environment.filters |= filters
    return environment


def _graphs(facts: dict[str, Any], label: str) -> Iterator[tuple[str, dict[str, Any]]]:
    others = facts["others"]
    yield (f"graph {len(others) + 1} (newest)" if others else label), facts
    if facts["draft"] is not None:
        yield from _graphs(facts["draft"], "draft model")
    for number, other in enumerate(others, 1):
        yield f"graph {number}", other


def _view(facts: dict[str, Any]) -> dict[str, Any]:
    """`facts`, with what the template would otherwise have to work out."""
    captures = [c for c in facts["captures"] if not c["dropped"]]
    rows = sum(c["replays"] * c["num_tokens"] for c in facts["captures"])
    padded = sum(c["padded_rows"] for c in facts["captures"])
    structures = {p["structure"]: p for p in facts["pieces"]}
    return {
        **facts,
        "bars": {kind["name"]: _bar(facts["program"]["steps"], kind["name"]) for kind in facts["kinds"]},
        "pieces": [_piece_view(p, facts["program"]["steps"]) for p in facts["pieces"]],
        "structures": structures,
        "counted": [p for p in facts["pieces"] if p["key"] is not None],
        "kept": captures,
        "by_kind": sorted(facts["captures"], key=lambda c: (c["kind"], -c["num_tokens"])),
        "kept_seconds": sum(c["seconds"] for c in captures),
        "kept_bytes": sum(c["memory_bytes"] for c in captures),
        "most_seconds": max((c["seconds"] for c in captures), default=0) or 1,
        "most_bytes": max((c["memory_bytes"] for c in captures), default=0) or 1,
        "waste": padded / rows if rows else None,
        "fates": _FATES,
    }


def _bar(steps: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The steps of one kind of batch, with which of them are in one graph with the step before."""
    bar, before = [], None
    for step in steps:
        fate = step["fates"][kind]["fate"]
        bar.append({"step": step, "fate": fate, "joined": fate == before == Fate.RECORDED.value})
        before = fate
    return bar


def _piece_view(piece: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    like = [steps[i] for i in piece["indices"]]
    return {
        **piece,
        "like": like,
        "first": like[0] if like else None,
        "code": piece["code"] and highlighted(piece["code"], "python"),
        "generated": piece["generated"] and highlighted(piece["generated"], "python"),
        "kernels": [{**k, "code": highlighted(k["code"], k["language"])} for k in piece["kernels"]],
    }


def highlighted(code: str, language: str) -> Markup:
    """`code` as HTML, escaped (by Pygments), with a class for each kind of word."""
    lexer = CppLexer() if language == "c++" else PythonLexer()
    return Markup(highlight(code, lexer, HtmlFormatter(nowrap=True)))


def in_seconds(seconds: float) -> str:
    """A time in the unit that reads best."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def indices_in_words(indices: list[int]) -> str:
    """All of a few numbers; the first two and the last of many."""
    if len(indices) <= 3:
        return ", ".join(map(str, indices))
    return f"{indices[0]}, {indices[1]} … {indices[-1]}"
