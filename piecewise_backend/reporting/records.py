"""What a report is made of: one record for each thing it speaks of. Strings and numbers only, so that a report keeps
no model, tensor or graph alive."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from piecewise_backend.reasons import Reason


class Fate(enum.StrEnum):
    """What became of one step in one kind of batch."""

    RECORDED = "recorded"
    """Inside a graph."""
    EAGER = "eager"
    """A breakpoint that runs between graphs."""
    NEVER = "never captured"
    """Runs without any graph, for a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One piece or breakpoint of the program, at its place."""

    index: int
    name: str
    """"piece 3", "mrv2::attention 4"."""
    structure: str
    """Key of its `PieceReport`: equal for steps that are the same code."""
    is_breakpoint: bool
    layer: str | None = None
    """The attention layer whose operator this is."""
    never: str = ""
    """Why no graph can hold it; empty where one can."""
    line: str = ""
    """The user's line that its first node comes from."""
    capturable: bool = True
    """Of a breakpoint: whether its kernels may be recorded at all."""
    owns_metadata: bool = True
    """Of a breakpoint: whether it knows the number of real rows itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceReport:
    """One distinct structure, however many steps it is."""

    structure: str
    """Twelve hexadecimal digits of a hash over operators, dtypes, shapes and constants."""
    key: str | None
    """What the compiled artifact is kept under; None where nothing was compiled."""
    source: str
    """"inductor", "disk", "aot_eager", "eager", or "as traced" where there is nothing to compile."""
    seconds: float
    """What compiling or loading it took."""
    launches: tuple[tuple[str, int], ...]
    """Traced operators and how often each is called, in order of first call."""
    code: str
    """Readable Python of the traced piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindReport:
    """One kind of batch, and what is recorded for it."""

    name: str
    """"decode" or "mixed" for the runner; "padded" or "exact" for a plain call."""
    what: str
    """Which batches these are, in words."""
    mode: str
    """NONE, PIECEWISE or FULL."""
    why_none: str = ""
    """Where the mode is NONE."""


@dataclass(slots=True, kw_only=True)
class SizeReport:
    """One captured variant."""

    descriptor: str
    num_tokens: int
    num_graphs: int
    seconds: float
    memory_bytes: int
    replays: int = 0
    padded_rows: int = 0
    """Padded rows computed over all replays."""
    eager_ops: tuple[str, ...] = ()
    """Operators that run between the graphs."""
    kind: str = ""
    """Name of its `KindReport`."""

    @property
    def padding_waste(self) -> float | None:
        """Padded share of the rows computed; None before the first replay, and for a size without rows."""
        rows = self.replays * self.num_tokens
        return self.padded_rows / rows if rows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One group of layers that keep caches."""

    backend: str
    num_layers: int
    support: str
    in_piece: bool
    """Whether its operators are parts of pieces."""
    decode: str
    """In uniform decode batches: "recorded", "breaks" or "no graphs"."""
    mixed: str
    """The same in all other batches."""
    decode_why: str = ""
    """Why it breaks in decode batches; empty where it does not."""
    mixed_why: str = ""
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryStep:
    """One step on the way from what was asked for to what was recorded."""

    title: str
    detail: str = ""
    reason: Reason | None = None
    """Where this step is a typed reason: it is among the report's reasons too."""


@dataclass(slots=True, kw_only=True)
class SpeculationReport:
    """How well guesses went."""

    method: str
    num_draft_tokens: int
    """Guesses for each request in a step."""
    proposed: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the guesses that were verified; 0 before any was."""
        return self.accepted / self.proposed if self.proposed else 0.0
