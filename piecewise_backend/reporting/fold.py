"""A long row in which the same few things come again and again, folded: `a (b c) x 11 b d`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

_LONGEST_PERIOD = 64


@dataclass(frozen=True, slots=True)
class Run:
    """`period` neighbours from `start` on, `repeats` times in a row."""

    start: int
    period: int
    repeats: int

    def places(self, offset: int) -> list[int]:
        """Where the neighbour at `offset` of the period is, in each repeat."""
        return [self.start + offset + r * self.period for r in range(self.repeats)]


def fold(row: Sequence[Hashable]) -> Iterator[Run]:
    """Runs that cover `row` in order. What comes once is a run of its own."""
    start = 0
    while start < len(row):
        best = Run(start, 1, 1)
        for period in range(1, min(_LONGEST_PERIOD, (len(row) - start) // 2) + 1):
            repeats = _repeats(row, start, period)
            if repeats > 1 and repeats * period > best.repeats * best.period:
                best = Run(start, period, repeats)
        yield best
        start += best.period * best.repeats


def _repeats(row: Sequence[Hashable], start: int, period: int) -> int:
    pattern, count = row[start : start + period], 1
    while row[start + count * period : start + (count + 1) * period] == pattern:
        count += 1
    return count
