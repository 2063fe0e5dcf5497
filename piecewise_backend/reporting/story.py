"""From what was asked for to what was recorded, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.reporting.records import StoryStep

if TYPE_CHECKING:
    from piecewise_backend.reporting.report import Report

_TOLD = frozenset(
    {
        ReasonCode.NO_RECORDER,
        ReasonCode.INPUT_NOT_STATIC,
        ReasonCode.PIECE_NOT_CAPTURABLE,
        ReasonCode.SEVERAL_DYNAMIC_DIMS,
        ReasonCode.CROSS_ROW,
        ReasonCode.MODE_ADAPTED,
        ReasonCode.INPUTS_ALIAS,
        ReasonCode.TOO_MANY_CAPTURES,
    }
)
"""Reasons that decide what a plain call captures; others are events of a single call."""


def story_of(report: Report) -> list[StoryStep]:
    """The steps that start-up noted; for a plain call, which decides as it goes, what its reasons tell."""
    if report.story:
        return [*report.story, *_ending(report)]
    steps = [StoryStep(title=f"asked for {report.mode_requested}")]
    steps += [told(reason) for reason, _ in report.reasons if reason.code in _TOLD]
    return [*steps, *_ending(report)]


def told(reason: Reason) -> StoryStep:
    """A reason as a step of the story."""
    return StoryStep(title=f"{reason.subject}: {reason.detail}", detail=reason.hint, reason=reason)


def _ending(report: Report) -> Iterator[StoryStep]:
    if report.recorder == "none" and report.mode_requested == "NONE":
        yield StoryStep(title="nothing is recorded", detail="mode NONE was asked for")
    elif report.recorder == "none":
        yield StoryStep(title="nothing is recorded", detail="no recorder is in use")
    else:
        yield StoryStep(title=f"{_count(report.num_captures, 'variant')} recorded with the {report.recorder} recorder")


def sizes_in_words(sizes: Sequence[int]) -> str:
    """All of a few sizes; the ends of many."""
    if len(sizes) <= 8:
        return ", ".join(map(str, sizes))
    return f"{', '.join(map(str, sizes[:4]))}, …, {sizes[-1]} ({len(sizes)} sizes)"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
