"""What a dry run found: frozen facts, and the same as text and as JSON."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from piecewise_backend.names import first_of
from piecewise_backend.reasons import ReasonCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that would break a graph, or that would run another way than asked."""

    code: ReasonCode
    op: str
    """The operator, as far as there is one; else what it is about."""
    place: str
    """ "file:line" of the user's code; "" where no line is to blame."""
    source: str
    """The code there."""
    why: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.op} at {self.place}" if self.place else self.op


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFacts:
    """One captured variant."""

    descriptor: str
    num_rows: int
    """0 for a graph of fixed sizes."""
    bucketed: bool
    """Whether smaller batches are padded to it; else it serves exactly its own size."""
    num_graphs: int
    between: tuple[str, ...]
    """What runs between the graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFacts:
    """One traced graph: a model without graph breaks has one."""

    name: str
    num_pieces: int
    breakpoints: tuple[str, ...]
    sizes: tuple[SizeFacts, ...]
    padding: str
    """What the proof of padding said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Estimates, bytes. The emulated recorder cannot tell what a driver keeps for each node of a graph."""

    static_buffers: int
    """Inputs' own buffers, of the largest size; all sizes share them."""
    graph_pool: int
    """Values alive at once in a run of the largest size. One pool serves all sizes, the largest recorded first."""
    graph_pool_at_most: int
    """The same if no memory were reused, neither within a graph nor between sizes."""
    caches: int = 0
    """Paged caches and states of a runner's layers at the limits of this dry run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer of a dry run."""

    model: str
    kind: str
    """ "plain" (called through torch.compile) or "runner" (made of attention layers)."""
    device: str
    compiler: str
    mode_requested: str
    mode_resolved: str
    sizes_tried: tuple[int, ...]
    findings: tuple[Finding, ...]
    graphs: tuple[GraphFacts, ...]
    memory: MemoryFacts
    notes: tuple[str, ...] = ()

    @property
    def captures_fully(self) -> bool:
        """Whether nothing would break, or run another way than asked."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """One line."""
        if self.captures_fully:
            count = sum(len(graph.sizes) for graph in self.graphs)
            what = "captures fully" if count else "runs as asked, without graphs"
            return f"{self.model} {what}: {count} variants in mode {self.mode_resolved}, nothing breaks"
        what = first_of([str(finding) for finding in self.findings])
        captured = any(graph.sizes for graph in self.graphs)
        return f"{self.model} {'captures in part' if captured else 'does not capture'}: {what}"

    def to_dict(self) -> dict[str, Any]:
        """All facts, as JSON has them."""
        facts = {"verdict": self.verdict, "captures_fully": self.captures_fully, **dataclasses.asdict(self)}
        for finding in facts["findings"]:
            finding["code"] = str(finding["code"])
        return facts

    def summary(self) -> Iterator[tuple[str, str]]:
        """(label, value) lines."""
        arrow = "" if self.mode_requested == self.mode_resolved else f" -> {self.mode_resolved}"
        yield "mode", f"{self.mode_requested}{arrow}"
        yield (
            "dry run",
            f"emulated recorder on {self.device}, pieces compiled by {self.compiler!r}, called as {self.kind}",
        )
        yield "rows tried", ", ".join(map(str, self.sizes_tried)) or "as given"
        m = self.memory
        yield "static buffers", f"{_bytes(m.static_buffers)} (inputs at the largest size; all sizes share them)"
        yield (
            "graph pool",
            f"about {_bytes(m.graph_pool)}, at most {_bytes(m.graph_pool_at_most)} if nothing were reused",
        )
        if m.caches:
            yield "caches", f"{_bytes(m.caches)} at the limits of this dry run"

    def __rich__(self) -> Group:
        color = "bold green" if self.captures_fully else "bold red"
        facts = Table.grid(padding=(0, 2))
        for label, value in self.summary():
            facts.add_row(Text(label, style="bold"), Text(value))
        parts: list[Any] = [Text(self.verdict, style=color), *self._findings(), facts]
        parts += [part for graph in self.graphs for part in _graph_parts(graph)]
        parts += [Text(f"note: {note}", style="dim") for note in self.notes]
        return Group(*parts)

    def _findings(self) -> Iterator[Text]:
        for number, finding in enumerate(self.findings, start=1):
            yield Text(f"{number}. {finding}", style="yellow")
            if finding.source:
                yield Text(f"     {finding.source}")
            yield Text(f"   {finding.code}: {finding.why}")
            if finding.hint:
                yield Text(f"   way out: {finding.hint}")

    def __str__(self) -> str:
        text = io.StringIO()
        # Wide, so that no path is cut in two.
        Console(width=1000, file=text, color_system=None, force_jupyter=False).print(self)
        return text.getvalue()


def _graph_parts(graph: GraphFacts) -> Iterator[Any]:
    between = f", {len(graph.breakpoints)} breakpoints ({', '.join(sorted(set(graph.breakpoints)))})"
    yield Text(f"\ngraph {graph.name}: {graph.num_pieces} pieces{between if graph.breakpoints else ''}", style="cyan")
    yield Text(f"padding: {graph.padding}")
    if not graph.sizes:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("variant", "serves", "graphs", "runs between graphs"):
        table.add_column(column)
    for size in graph.sizes:
        serves = f"batches padded to {size.num_rows}" if size.bucketed else "exactly this size"
        table.add_row(size.descriptor, serves, str(size.num_graphs), _counted(size.between))
    yield table


def _counted(names: tuple[str, ...]) -> str:
    """Steps by operator: "attention 3" and "attention 5" are "attention x2"."""
    plain = [name.rpartition(" ")[0] or name for name in names]
    return ", ".join(f"{name} x{plain.count(name)}" for name in dict.fromkeys(plain)) or "nothing"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
