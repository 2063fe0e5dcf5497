"""What `verify` found: which sizes agree with eager, and the first step that does not."""

from __future__ import annotations

import enum
import io
from dataclasses import dataclass

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text


class VerificationError(RuntimeError):
    """A compiled model computes something else than it does without being compiled."""


class Fault(enum.StrEnum):
    """Who is at fault."""

    TRACING = "tracing"
    """The traced graphs already differ from the model: Dynamo, or a model that Dynamo cannot see all of."""
    COMPILER = "compiler"
    """A compiled piece differs from the same piece as traced, on the same inputs."""
    REPLAY = "replay"
    """A graph's replay differs from the same steps without graphs."""
    ERROR = "error"
    """The check itself could not be carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first step of one size that is wrong."""

    size: str
    fault: Fault
    step: str
    """"piece 3", "mrv2::attention 4"; what differs, where the step is not known."""
    op: str = ""
    """The operator, where it could be told; several for a recording that has become stale."""
    line: str = ""
    """The user's line that called it."""
    max_abs: float = 0.0
    max_rel: float = 0.0
    """Largest difference of an element in units of that element."""
    tolerance: float = 0.0
    """Largest allowed difference, absolute."""
    detail: str = ""

    def __str__(self) -> str:
        where = f"{self.step}, {self.op}" if self.op else self.step
        line = f" at {self.line}" if self.line else ""
        by = f": off by {self.max_abs:.3g} (relative {self.max_rel:.3g}, allowed {self.tolerance:.3g})"
        detail = f"; {self.detail}" if self.detail else ""
        return f"{self.size}: the {self.fault} is wrong in {where}{line}{by if self.max_abs else ''}{detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One size that was looked at."""

    size: str
    num_steps: int
    compiled: int
    """Compiled pieces compared with the same pieces as traced."""
    replayed: bool
    """Whether its graphs were replayed."""
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()
    """What was not compared, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of `verify`. It prints as a table; `ok` is the short answer."""

    subject: str
    checked: tuple[Checked, ...]
    differences_of_whole: tuple[Difference, ...] = ()
    """Between the traced graphs together and the model itself."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Everything that differs, size by size."""
        return (*self.differences_of_whole, *(d for size in self.checked for d in size.differences))

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not compared, and why; each once."""
        return tuple(dict.fromkeys(note for size in self.checked for note in size.notes))

    @property
    def ok(self) -> bool:
        """Whether nothing differs. What could not be compared is in `notes`."""
        return not self.differences

    def raise_if_wrong(self) -> None:
        """VerificationError with everything that differs, if anything does."""
        if not self.ok:
            raise VerificationError("\n".join([f"{self.subject} computes wrong values:", *map(str, self.differences)]))

    def __rich__(self) -> Group:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("size", "steps", "compiled pieces", "replay", "verdict"):
            table.add_column(column)
        for size in self.checked:
            verdict = "wrong" if size.differences else "as eager"
            replay = "compared" if size.replayed else "not compared"
            table.add_row(size.size, str(size.num_steps), str(size.compiled), replay, verdict)
        lines = [Text(str(d), style="red") for d in self.differences]
        notes = [Text(f"not compared: {note}", style="yellow") for note in self.notes]
        word = Text("agrees with eager" if self.ok else "WRONG", style="bold green" if self.ok else "bold red")
        return Group(Text.assemble(f"mrv2 verify, {self.subject}: ", word), table, *lines, *notes)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(width=160, file=text, color_system=None, force_jupyter=False).print(self)
        return text.getvalue()
