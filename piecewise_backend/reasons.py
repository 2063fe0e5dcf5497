"""Why something was skipped, downgraded, refused or done another way: one typed record, one list of codes."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


class ReasonCode(enum.StrEnum):
    """Every reason the report can give; `docs` and tests go by these names."""

    NO_RECORDER = "no_recorder"
    """Nothing can record graphs for this device, so the mode is NONE."""
    MODE_ADAPTED = "mode_adapted"
    """The mode asked for became another one, by what the attention backends support."""
    GROUP_BREAKS = "group_breaks"
    """A group of attention layers runs between graphs that were asked to hold it; other groups are recorded."""
    OPERATOR_SPLITS = "operator_splits"
    """An operator that belongs into the pieces is a breakpoint, since its metadata cannot be captured."""
    SUPPORT_LOWERED = "support_lowered"
    """A metadata builder refused what its declared support promises; start-up went on with what it gives."""
    BACKEND_CHOSEN = "backend_chosen"
    """An attention backend was passed over for another."""
    COMPILER_UNAVAILABLE = "compiler_unavailable"
    """Inductor cannot build code here; pieces run as they were traced."""
    ARTIFACT_UNREADABLE = "artifact_unreadable"
    """An artifact on disk was corrupt or foreign; the piece was compiled again."""
    ARTIFACT_NOT_SAVED = "artifact_not_saved"
    """A compiled piece could not be written to disk."""
    PROGRAM_STALE = "program_stale"
    """A traced program on disk does not fit the model as it is now; the model was traced again."""
    PROGRAM_NOT_KEPT = "program_not_kept"
    """A traced program cannot be kept on disk, so each start traces the model again."""
    STATE_FIXED = "state_fixed"
    """A model's forward changes a number or flag among its attributes; all steps see the value that the trace saw."""
    PIECE_NOT_CAPTURABLE = "piece_not_capturable"
    """A piece holds an operator that no graph can record; it runs between graphs."""
    GRAPH_BREAK = "graph_break"
    """Dynamo cannot trace a line, so the model became several graphs with that line between them."""
    SIZE_FIXED = "size_fixed"
    """A line works at one size only, so no other size of the dynamic dimension runs."""
    PIECE_LAUNCHES_NOTHING = "piece_launches_nothing"
    """A piece holds only views and allocations, so there is nothing to record."""
    INPUT_NOT_STATIC = "input_not_static"
    """An input cannot be given a fixed address (a host scalar of a device program, a non-tensor object)."""
    INPUT_MOVED = "input_moved"
    """A tensor that was recorded at its own address is elsewhere now; captured again."""
    INPUTS_ALIAS = "inputs_alias"
    """Inputs share memory in another pattern than when the graph was traced; run uncompiled."""
    CROSS_ROW = "cross_row"
    """A real row depends on a padded row, so this size is captured exactly."""
    PADDING_UNUSED = "padding_unused"
    """A padding rule names an input that this graph does not have."""
    SEVERAL_DYNAMIC_DIMS = "several_dynamic_dims"
    """More than one independent dynamic dimension: sizes are captured exactly."""
    NOT_SEEN_TWICE = "not_seen_twice"
    """A size ran compiled because it had not been seen before."""
    TOO_MANY_CAPTURES = "too_many_captures"
    """The limit of captures was reached; this size runs compiled."""
    ABOVE_ALL_SIZES = "above_all_sizes"
    """A batch larger than every capture size runs compiled."""
    TOO_MUCH_PADDING = "too_much_padding"
    """The smallest fitting size would waste more than the declared limit; runs compiled."""
    CAPTURE_FAILED = "capture_failed"
    """Recording a size failed; that size alone is dropped."""
    OUT_OF_MEMORY = "out_of_memory"
    """Memory ran out while recording a size; that size alone is dropped."""
    NOT_ON_ALL_RANKS = "not_on_all_ranks"
    """A size was not captured on every data-parallel rank, so no rank uses it."""
    GRAPH_MEMORY_BUDGET = "graph_memory_budget"
    """A size was left out, since all graphs together would take more memory than they may."""
    PREEMPTED = "preempted"
    """A request gave its blocks back and is computed again later."""
    VOCABULARIES_DIFFER = "vocabularies_differ"
    """A draft model knows other tokens than the model it guesses for; what only one of them knows is not guessed."""
    REQUEST_REFUSED = "request_refused"
    """One request was refused; the others go on."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that did not go the straight way, and the way out."""

    code: ReasonCode
    subject: str
    """What it is about: a size, a piece, an input, a mode."""
    detail: str
    """What happened."""
    hint: str = ""
    """What the user can do about it."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.detail}" + (f" ({self.hint})" if self.hint else "")


class FallbackError(RuntimeError):
    """Raised in place of a fallback when `on_fallback="error"`."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"[{reason.code}] {reason}")
        self.reason = reason


# Facts about a size or a choice rather than a loss: they are reported, never raised.
_NOT_FALLBACKS = frozenset(
    {
        ReasonCode.BACKEND_CHOSEN,
        ReasonCode.PADDING_UNUSED,  # a model of several graphs has them one by one
        ReasonCode.PIECE_LAUNCHES_NOTHING,
        ReasonCode.NOT_SEEN_TWICE,
        ReasonCode.ARTIFACT_NOT_SAVED,
        ReasonCode.PROGRAM_STALE,
        ReasonCode.PROGRAM_NOT_KEPT,
        ReasonCode.PREEMPTED,
        ReasonCode.REQUEST_REFUSED,
    }
)


def is_fallback(code: ReasonCode) -> bool:
    """Whether something is lost; else it is a fact about a size or a choice, which is never raised."""
    return code not in _NOT_FALLBACKS


class Reasons:
    """Reasons with how often each occurred, in order of first occurrence."""

    def __init__(self, *, on_fallback: str = "report") -> None:
        self._counts: dict[Reason, int] = {}
        self._raise = on_fallback == "error"

    def add(self, reason: Reason) -> None:
        """Count `reason`; raises `FallbackError` where fallbacks are errors."""
        self._counts[reason] = self._counts.get(reason, 0) + 1
        if self._raise and is_fallback(reason.code):
            raise FallbackError(reason)

    def extend(self, reasons: Iterable[Reason]) -> None:
        for reason in reasons:
            self.add(reason)

    def __iter__(self) -> Iterator[tuple[Reason, int]]:
        return iter(list(self._counts.items()))

    def __len__(self) -> int:
        return len(self._counts)

    def codes(self) -> set[ReasonCode]:
        """The codes that occurred."""
        return {reason.code for reason in self._counts}
