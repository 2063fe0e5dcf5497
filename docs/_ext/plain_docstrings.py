"""Docstrings of this project as reStructuredText: they are plain text with `code` in backticks.

A block that is indented under a line of text is shown as it stands; `*`, `|` and a trailing `_` mean themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

_CODE = re.compile(r"(`[^`]*`)")
_MARKUP = re.compile(r"([*|\\]|_(?!\w))")


def as_rst(lines: Sequence[str]) -> list[str]:
    """`lines` of a docstring (indentation removed) with nothing in them that reStructuredText would misread.

    Before:  "Splits a*b.", "", "    x = 1"
    After:   "Splits a\\*b.", "", "::", "", "    x = 1"
    """
    found: list[str] = []
    for indented, block in _blocks(lines):
        if indented:
            found += ["", "::", "", *block, ""]
        else:
            found += _escaped("\n".join(block)).split("\n")
    return found


def _blocks(lines: Sequence[str]) -> Iterator[tuple[bool, list[str]]]:
    """(is it indented, its lines) of runs of lines; blank lines go with what comes before them."""
    block: list[str] = []
    indented = False
    for line in lines:
        if line.strip() and line.startswith(" ") != indented:
            if block:
                yield indented, block
            block, indented = [], not indented
        block.append(line)
    if block:
        yield indented, block


def _escaped(text: str) -> str:
    """A quote may go over a line's end, so this takes a whole block at once."""
    parts = _CODE.split(text)
    return "".join(part if i % 2 else _MARKUP.sub(r"\\\1", part) for i, part in enumerate(parts))


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _process_signature)
    return {"parallel_read_safe": True}


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = as_rst(lines)


def _process_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str
) -> Any:
    """A default that a dataclass makes anew for each object has no text that is valid Python."""
    return (signature.replace("<factory>", "..."), returns) if signature and "<factory>" in signature else None
