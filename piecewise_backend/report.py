"""What happened to a model: split, compiled, captured, replayed, and what went another way, with its reason."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from piecewise_backend.reasons import Reasons


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


@dataclass(slots=True, kw_only=True)
class Report:
    """The facts about one compiled graph, updated as it runs."""

    name: str
    mode_requested: str
    mode_resolved: str
    recorder: str
    num_pieces: int
    num_breakpoints: int
    compiled: dict[str, str]
    """Distinct pieces: key to "inductor", "disk", "aot_eager" or "eager"."""
    compile_seconds: float
    capture_sizes: tuple[int, ...] = ()
    sizes: list[SizeReport] = field(default_factory=list)
    dropped: list[SizeReport] = field(default_factory=list)
    """Variants that were captured and given up since: what they were recorded on has moved."""
    groups: list[GroupReport] = field(default_factory=list)
    """Layers that keep caches, group by group; empty for a plain call."""
    speculation: SpeculationReport | None = None
    draft: Report | None = None
    """Of the draft model, which has a program and captures of its own."""
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
        yield "program", f"{self.num_pieces} pieces, {self.num_breakpoints} breakpoints"
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

    def __rich__(self) -> Group:
        facts = Table.grid(padding=(0, 2))
        for label, value in self.summary():
            facts.add_row(Text(label, style="bold"), Text(value))
        parts: list[object] = [Text(f"mrv2 report: {self.name}", style="bold cyan"), facts]
        if self.groups:
            parts.append(self._groups_table())
        if self.sizes:
            parts.append(self._sizes_table())
        if len(self.reasons):
            parts.append(self._reasons_table())
        if self.draft is not None:
            parts.extend([Text(), self.draft.__rich__()])
        return Group(*parts)  # type: ignore[arg-type]

    def _groups_table(self) -> Table:
        table = Table(title="attention groups", title_justify="left", box=None, padding=(0, 1, 0, 0))
        for column in ("backend", "layers", "support", "place", "decode", "mixed"):
            table.add_column(column)
        for g in self.groups:
            place = "in pieces" if g.in_piece else "breakpoint"
            table.add_row(g.backend, str(g.num_layers), g.support, place, g.decode, g.mixed)
        return table

    def _sizes_table(self) -> Table:
        table = Table(title="captured", title_justify="left", box=None, padding=(0, 1, 0, 0))
        for column in ("variant", "graphs", "eager", "capture", "memory", "replays", "padding"):
            table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
        for s in self.sizes:
            rows = s.replays * s.num_tokens
            waste = f"{s.padded_rows / rows:.0%}" if rows else "-"
            table.add_row(
                s.descriptor,
                str(s.num_graphs),
                str(len(s.eager_ops)),
                f"{s.seconds * 1e3:.0f} ms",
                f"{s.memory_bytes / 2**20:.2f} MiB",
                str(s.replays),
                waste,
            )
        return table

    def _reasons_table(self) -> Table:
        table = Table(title="what went another way", title_justify="left", box=None)
        for column in ("times", "code", "what", "way out"):
            table.add_column(column)
        for reason, count in self.reasons:
            table.add_row(str(count), reason.code.value, Text(f"{reason.subject}: {reason.detail}"), Text(reason.hint))
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(width=140, file=text, color_system=None, force_jupyter=False).print(self)
        return text.getvalue()
