"""The page of a dump."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from piecewise_backend.dumping.folder import DumpFolder


def index_page(folder: DumpFolder, titles: Mapping[str, str]) -> str:
    """Markdown with a link to every file, graph by graph, and what is missing."""
    lines = ["# mrv2 dump", "", f"torch {torch.__version__}", ""]
    if folder.problems:
        lines += ["## What is missing", "", *(f"- {problem}" for problem in dict.fromkeys(folder.problems)), ""]
    dynamo = [name for name in folder.files if name.startswith("dynamo_")]
    if dynamo:
        lines += ["## What Dynamo made", "", *_links(folder, dynamo), ""]
    for graph, title in titles.items():
        names = [name for name in folder.files if name.startswith(f"{graph}/")]
        lines += [f"## {graph}: {title}", "", *_links(folder, names), ""]
    if not titles:
        lines += ["No graph was compiled by mrv2 while this dump was open.", ""]
    return "\n".join(lines)


def _links(folder: DumpFolder, names: list[str]) -> list[str]:
    return [f"- [{name}]({name}): {folder.files[name]}" for name in names]
