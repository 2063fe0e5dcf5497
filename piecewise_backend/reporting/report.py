"""What happened to a model: split, compiled, captured, replayed, and what went another way, with its reason."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType

from piecewise_backend.reasons import Reasons
from piecewise_backend.reporting.as_dict import as_dict
from piecewise_backend.reporting.page import frame, page
from piecewise_backend.reporting.records import (
    GroupReport,
    KindReport,
    PieceReport,
    SizeReport,
    SpeculationReport,
    StepReport,
    StoryStep,
)
from piecewise_backend.reporting.terminal import render

_SUFFIXES = (".html", ".json", ".txt")


@dataclass(slots=True, kw_only=True)
class Report:
    """The facts about one compiled graph, updated as it runs. It keeps no model, tensor or graph alive.

    `print(report)` shows it on a terminal, a notebook shows it by itself, `save` writes it to a file.
    """

    name: str
    mode_requested: str
    mode_resolved: str
    recorder: str
    num_pieces: int
    num_breakpoints: int
    compiled: dict[str, str]
    """Distinct pieces: key to "inductor", "disk", "aot_eager" or "eager"."""
    compile_seconds: float
    program_source: str = "traced"
    """Of a runner's model: "disk", where an earlier start's trace was taken."""
    program_seconds: float = 0.0
    """What tracing and compiling, or reading, took a runner in all."""
    steps: tuple[StepReport, ...] = ()
    """Pieces and breakpoints in order."""
    structures: dict[str, PieceReport] = field(default_factory=dict)
    """What the steps are, each distinct one once, by key."""
    kinds: tuple[KindReport, ...] = ()
    """The kinds of batch, as start-up resolved them; empty for a plain call."""
    story: tuple[StoryStep, ...] = ()
    """From what was asked for to what start-up decided; empty for a plain call."""
    capture_sizes: tuple[int, ...] = ()
    sizes: list[SizeReport] = field(default_factory=list)
    dropped: list[SizeReport] = field(default_factory=list)
    """Variants that were captured and given up since: what they were recorded on has moved."""
    groups: list[GroupReport] = field(default_factory=list)
    """Layers that keep caches, group by group; empty for a plain call."""
    speculation: SpeculationReport | None = None
    draft: Report | None = None
    """Of the draft model, which has a program and captures of its own."""
    others: tuple[Report, ...] = ()
    """Of the other graphs of the same compiled function, oldest first, as `piecewise_backend.report` found them."""
    estimated_graph_bytes: int = 0
    """What all graphs were expected to take, told from the first few; 0 for a plain call, which captures as it goes."""
    uncaptured_runs: int = 0
    """Calls that ran the compiled pieces without graphs."""
    reasons: Reasons = field(default_factory=Reasons)

    @property
    def num_replays(self) -> int:
        """Replays of all variants, dropped ones included."""
        return sum(size.replays for size in (*self.sizes, *self.dropped))

    @property
    def num_captures(self) -> int:
        """Variants that are captured now."""
        return len(self.sizes)

    def drop(self, size: SizeReport) -> None:
        """Note that a captured variant was given up."""
        self.sizes.remove(size)
        self.dropped.append(size)

    def summary(self) -> Iterator[tuple[str, str]]:
        """(label, value) lines."""
        arrow = "" if self.mode_requested == self.mode_resolved else f" -> {self.mode_resolved}"
        yield "mode", f"{self.mode_requested}{arrow} (recorder: {self.recorder})"
        how = "read from disk" if self.program_source == "disk" else self.program_source
        took = f", {how} in {self.program_seconds:.2f} s" if self.program_seconds else ""
        yield "program", f"{self.num_pieces} pieces, {self.num_breakpoints} breakpoints{took}"
        sources = sorted(set(self.compiled.values()))
        counts = ", ".join(f"{list(self.compiled.values()).count(s)} {s}" for s in sources) or "nothing to compile"
        yield "distinct compiles", f"{len(self.compiled)} ({counts}) in {self.compile_seconds:.2f} s"
        yield "capture sizes", ", ".join(map(str, self.capture_sizes)) or "as they come"
        seconds = sum(s.seconds for s in self.sizes)
        memory = sum(s.memory_bytes for s in self.sizes)
        dropped = f", besides {len(self.dropped)} given up" if self.dropped else ""
        expected = f" (estimated {self.estimated_graph_bytes / 2**20:.1f})" if self.estimated_graph_bytes else ""
        yield "captures", f"{self.num_captures} in {seconds:.2f} s, {memory / 2**20:.1f} MiB{expected}{dropped}"
        yield "replays", f"{self.num_replays}, besides {self.uncaptured_runs} runs without graphs"
        if (spec := self.speculation) is not None:
            counts = f"{spec.accepted} of {spec.proposed} guesses accepted ({spec.acceptance_rate:.0%})"
            yield "speculation", f"{spec.method}, {spec.num_draft_tokens} a step: {counts}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data under stable keys; `piecewise_backend.reporting.as_dict` lists them."""
        return as_dict(self)

    def to_json(self) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | Path) -> Path:
        """Write the report to `path`: a page that stands alone (.html), data (.json), or text (.txt).

        Returns the path. ValueError for another suffix.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix not in _SUFFIXES:
            raise ValueError(f"a report is saved as {', '.join(_SUFFIXES)}, got {path.name!r}; end the name in one")
        text = {".html": self._page, ".json": self.to_json, ".txt": self.__str__}[suffix]()
        path.write_text(text, encoding="utf-8")
        return path

    def _page(self) -> str:
        return page(self.to_dict())

    def _repr_html_(self) -> str:
        """For notebooks: the page in a frame of its own, so that its style and the notebook's do not meet."""
        return frame(self._page())

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [render(as_dict(self, code=False), list(self.summary()))]
        if self.draft is not None:
            parts.extend(["", self.draft.__rich__()])
        return Group(*parts)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(width=140, file=text, color_system=None, force_jupyter=False).print(self)
        return text.getvalue()
