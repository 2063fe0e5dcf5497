"""A split graph as one Python module: each distinct segment a class, and a function that calls them in order."""

from __future__ import annotations

from piecewise_backend.piece_code import import_lines, readable_code
from piecewise_backend.split import NodeName, Segment, SplitGraph


def split_code(graph: SplitGraph) -> str:
    """before: one graph         after:

    class Piece0(torch.nn.Module): ...
    class Breakpoint1(torch.nn.Module): ...
    def forward(x, w):
        (h, out,) = Piece0()(x, w)
        Breakpoint1()(h, out)
        return (out,)
    """
    names: dict[str, str] = {}
    imports: dict[str, None] = {}
    classes, calls = [], []
    for index, segment in enumerate(graph.segments):
        if segment.structure not in names:
            names[segment.structure] = f"{'Piece' if segment.breakpoint is None else 'Breakpoint'}{index}"
            lines = import_lines(segment.module)
            imports |= dict.fromkeys(lines)
            classes.append(_class_of(segment, names[segment.structure]))
        calls.append(f"    {_call(segment, names[segment.structure])}")
    returned = ", ".join(str(o) if isinstance(o, NodeName) else repr(o) for o in graph.outputs)
    forward = [f"def forward({', '.join(graph.placeholders)}):", *calls, f"    return ({returned},)"]
    return "\n".join([*imports, "", "", "\n\n\n".join([*classes, "\n".join(forward)]), ""])


def _class_of(segment: Segment, name: str) -> str:
    code = readable_code(segment.module)
    return code[code.index("class GraphModule") :].replace("class GraphModule", f"class {name}", 1).strip()


def _call(segment: Segment, name: str) -> str:
    made = f"({', '.join(segment.outputs)},) = " if segment.outputs else ""
    return f"{made}{name}()({', '.join(segment.inputs)})"
