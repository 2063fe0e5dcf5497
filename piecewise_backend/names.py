"""Errors for a name that is not one of the allowed: what, got, allowed, nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def unknown_name(what: str, got: object, allowed: Iterable[str], *, show: int = 40) -> ValueError:
    """The error to raise for an unknown `what`, naming the nearest of `allowed`."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(got), names, n=3, cutoff=0.6)
    if not near:  # a short name inside a long one is a near miss too ("sdpa" does not look like its full name)
        near = [name for name in names if str(got).lower() in name.lower()][:3]
    message = f"unknown {what} {got!r}"
    if near:
        message += f"; did you mean {' or '.join(map(repr, near))}?"
    if len(names) <= show:
        message += f" Allowed: {', '.join(names)}"
    return ValueError(message)


def first_of(names: Sequence[str]) -> str:
    """The first of `names`, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
