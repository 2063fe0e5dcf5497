"""The directive `report-keys`: what a report's JSON holds, from the docstring of the module that makes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sphinx.util.docutils import SphinxDirective

from piecewise_backend.reporting import as_dict

_ROW = re.compile(r" {4}(?P<nested> *)(?P<names>\w+(?:, \w+)*)(?: {2,}(?P<what>\S.*))?")
_CONTINUED = re.compile(r" {12,}(?P<what>\S.*)")


def rows(docstring: str) -> Iterator[tuple[str, str]]:
    """(dotted key, what it holds): "program", "program.steps", ..."""
    found: list[tuple[str, str]] = []
    parent = ""
    for line in docstring.splitlines():
        if (more := _CONTINUED.fullmatch(line)) and found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {more['what']}")
        elif row := _ROW.fullmatch(line):
            for name in row["names"].split(", "):
                found.append((f"{parent}.{name}" if row["nested"] else name, row["what"] or ""))
                parent = parent if row["nested"] else name
    yield from found


class ReportKeys(SphinxDirective):
    """`{report-keys}`: no argument and no content."""

    def run(self) -> list[Any]:
        """The table."""
        lines = ["| key | what |", "|---|---|"]
        for key, what in rows(as_dict.__doc__ or ""):
            lines.append(f"| `{key}` | {what.replace('|', chr(92) + '|')} |")
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.add_directive("report-keys", ReportKeys)
    return {"parallel_read_safe": True}
