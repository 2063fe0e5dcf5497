"""The user's line of code that made a node, for messages."""

from __future__ import annotations

from torch import fx


def source_line(node: fx.Node) -> str:
    """ "file:line, in function: code" of the user's line that made `node`."""
    frames = [line.strip() for line in node.meta.get("stack_trace", "").splitlines()]
    for index in range(len(frames) - 1, -1, -1):
        if frames[index].startswith("File "):
            code = frames[index + 1] if index + 1 < len(frames) else ""
            place = frames[index].removeprefix("File ").replace('"', "").replace(", line ", ":")
            return f"{place}: {code}"
    return f"node {node.name}"
