"""The program as the report shows it: a record of each step, and one of each distinct structure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import fx

from piecewise_backend.breakpoints import target_names
from piecewise_backend.compile import CompiledPiece
from piecewise_backend.cudagraph.capture import Step
from piecewise_backend.piece_code import readable_code
from piecewise_backend.reporting.records import PieceReport, StepReport
from piecewise_backend.source_lines import source_line
from piecewise_backend.split import Segment

_FREE = frozenset(
    {
        *("getitem", "getattr", "size", "Size", "shape", "stride", "numel", "detach", "alias"),
        *("view", "view_as", "reshape", "flatten", "unflatten", "expand", "unsqueeze", "squeeze"),
        *("transpose", "permute", "movedim", "t", "T", "mT"),
        *("split", "chunk", "unbind", "narrow", "select", "slice"),
    }
)
"""Names under which a graph computes nothing: elements of tuples, sizes, views."""


def describe_steps(
    segments: Sequence[Segment], steps: Sequence[Step], pieces: Sequence[CompiledPiece | None]
) -> tuple[tuple[StepReport, ...], dict[str, PieceReport]]:
    """Records of the steps, in order, and of their structures, by key; `pieces` are the compiled ones or None.

    A structure's code is written out at once, and once: its graph need not be kept for it.
    """
    found, structures = [], dict[str, PieceReport]()
    for index, (segment, step, piece) in enumerate(zip(segments, steps, pieces, strict=True)):
        structure = structure_key(segment, step.layer)
        if structure not in structures:
            structures[structure] = _piece_report(structure, segment, piece)
        found.append(_step_report(index, structure, segment, step))
    return tuple(found), structures


def structure_key(segment: Segment, layer: str | None) -> str:
    """Twelve digits, equal for equal code: attention operators that differ in the layer's name alone count as equal."""
    text = segment.structure if layer is None else segment.structure.replace(f"str:{layer!r}", "layer")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _piece_report(structure: str, segment: Segment, piece: CompiledPiece | None) -> PieceReport:
    return PieceReport(
        structure=structure,
        key=None if piece is None else piece.key,
        source="as traced" if piece is None else piece.source,
        seconds=0.0 if piece is None else piece.seconds,
        launches=tuple(_operators(segment.module).items()),
        code=_code(segment.module),
    )


def _code(module: fx.GraphModule) -> str:
    """Readable Python of a segment. A graph that torch cannot write out runs all the same, so that is no error."""
    try:
        return readable_code(module)
    except Exception as error:
        return f"# torch cannot write this graph as Python: {type(error).__name__}: {' '.join(str(error).split())}\n"


def _step_report(index: int, structure: str, segment: Segment, step: Step) -> StepReport:
    never = ""
    if step.forbidden is not None:
        never = str(step.forbidden)
    elif not step.launches:
        never = "launches nothing: views and allocations only"
    found = segment.breakpoint
    return StepReport(
        index=index,
        name=step.name,
        structure=structure,
        is_breakpoint=found is not None,
        layer=step.layer,
        never=never,
        line=_first_line(segment.module),
        capturable=found is None or found.capturable,
        owns_metadata=found is None or found.owns_metadata,
    )


def _operators(module: fx.GraphModule) -> Mapping[str, int]:
    """Operators that compute something, by short name, in order of first call."""
    names = (_short_name(n) for n in module.graph.nodes if n.op in ("call_function", "call_method", "call_module"))
    return Counter(name for name in names if name not in _FREE)


def _short_name(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    names = target_names(node.target)
    name = names[-1] if names else str(node.target)
    if "::" not in name:
        return name.rpartition(".")[2]
    return name.removeprefix("aten::")


def _first_line(module: fx.GraphModule) -> str:
    lines = (source_line(n) for n in module.graph.nodes if "stack_trace" in n.meta)
    return next(lines, "")
