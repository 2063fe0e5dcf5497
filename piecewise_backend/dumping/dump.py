"""`with piecewise_backend.dump(folder):` around the first call, or MRV2_DUMP=folder."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx

from piecewise_backend.config import environment_dump_dir
from piecewise_backend.cudagraph.capture import CapturedProgram
from piecewise_backend.dumping.bytecode import BytecodeDump
from piecewise_backend.dumping.captures import describe_capture
from piecewise_backend.dumping.folder import DumpFolder
from piecewise_backend.dumping.index import index_page
from piecewise_backend.dumping.split_code import split_code
from piecewise_backend.names import first_of
from piecewise_backend.observe import observed_by, observers
from piecewise_backend.piece_code import generated_code, readable_code
from piecewise_backend.program import Program
from piecewise_backend.reporting.report import Report
from piecewise_backend.split import SplitGraph
from piecewise_backend.structured_trace import listing, resolution

logger = logging.getLogger(__name__)

_open: set[Path] = set()


@contextlib.contextmanager
def dump(folder: str | Path) -> Iterator[Dump]:
    """While this is open, write to `folder` what becomes of every model that is compiled by mrv2: a plain
    `torch.compile`, an `LLM`, a `ModelRunner`.

        index.md                    links all of it
        dynamo_<n>_<function>.py    what Dynamo made of the Python, decompiled (needs depyf), and its guards
        graph_<n>/before_split.py   the FX graph, and after_split.py: its pieces and breakpoints
        graph_<n>/piece_<key>.py    each distinct piece; piece_<key>_inductor.py is Inductor's output for it;
                                    breakpoint_<key>.py is an operator between pieces
        graph_<n>/captures.json     inputs and metadata of each capture: shapes, dtypes, addresses
        graph_<n>/resolution.json   modes, sizes and the reasons, in order; report.txt is the report

    Every .py file can be imported. Files of an earlier dump into the same folder are removed, other files stay. Where
    the model fails, what there is until then is written, and the error goes on. Dumps into different folders may be
    nested. ValueError for a folder that is being dumped to already, OSError for one that cannot be written.
    """
    path = Path(folder).expanduser().resolve()
    if path in _open:
        raise ValueError(f"a dump to {path} is open already; nested dumps need folders of their own")
    dumping = Dump(DumpFolder.open(path))
    _open.add(path)
    dumping.bytecode.open()
    try:
        with observed_by(dumping):
            yield dumping
    except BaseException as error:
        dumping.folder.problems.append(f"the model failed: {type(error).__name__}: {error}")
        raise
    finally:
        _open.discard(path)
        dumping.close()


@dataclass(slots=True)
class _Graph:
    """What is known of one graph so far."""

    name: str
    inputs: Any = None
    """`Program.inputs`, which variations of a program share."""
    report: Report | None = None
    keys: frozenset[str] = frozenset()
    captures: list[dict[str, Any]] = field(default_factory=list)
    sizes: list[Any] = field(default_factory=list)
    """`SizeReport`s that have been given to captures."""


class Dump:
    """An open dump: an observer that writes. `index` is its page once it is closed."""

    def __init__(self, folder: DumpFolder) -> None:
        self.folder = folder
        self.bytecode = BytecodeDump(folder)
        self._graphs: list[_Graph] = []
        self._lock = threading.RLock()

    @property
    def index(self) -> Path:
        """The page that links everything."""
        return self.folder.path / "index.md"

    # Called while a model is compiled.

    def split(self, gm: fx.GraphModule, graph: SplitGraph) -> None:
        with self._lock:
            name = self._new_graph().name
            self.folder.write(f"{name}/before_split.py", readable_code(gm), "the graph that Dynamo made")
            self.folder.write(f"{name}/after_split.py", split_code(graph), "its pieces and breakpoints, in order")

    def compiled(self, program: Program, report: Report) -> None:
        with self._lock:
            graph = next((g for g in reversed(self._graphs) if g.inputs is None), None) or self._new_graph()
            graph.inputs, graph.report = program.inputs, report
            self.folder.write(f"{graph.name}/program.txt", listing(program), "the steps of the program")
            self._write_pieces(graph, report)

    def captured(self, program: Program, args: Sequence[Any], captured: CapturedProgram) -> None:
        with self._lock:
            graph = next((g for g in self._graphs if g.inputs is program.inputs), None)
            if graph is None:  # not traced in this process: its program was on disk
                graph = self._new_graph()
                graph.inputs, graph.keys = program.inputs, frozenset(p.key for p in program.pieces)
                self.folder.write(f"{graph.name}/program.txt", listing(program), "the steps of the program, from disk")
            _name_captures(graph)
            graph.captures.append(describe_capture(program, args, captured))

    def started(self, report: Report) -> None:
        with self._lock:
            if all(g.report is not report for g in self._graphs):
                found = [g for g in self._graphs if g.report is None and g.keys == frozenset(report.compiled)]
                graph = found[-1] if found else self._new_graph()
                graph.report = report
                self.folder.problems.append(
                    f"{graph.name}: its program was read from disk, so there is no graph of it; "
                    "start with options={'cache': False} to see it traced"
                )
                self._write_pieces(graph, report)
            self._write_index()

    # Writing.

    def close(self) -> None:
        """Write what is only known at the end."""
        with self._lock:
            self.bytecode.close()
            self._write_index()
            for problem in dict.fromkeys(self.folder.problems):
                logger.warning("dump to %s: %s", self.folder.path, problem)

    def _new_graph(self) -> _Graph:
        self._graphs.append(_Graph(f"graph_{len(self._graphs)}"))
        return self._graphs[-1]

    def _write_pieces(self, graph: _Graph, report: Report) -> None:
        for piece in report.structures.values():
            users = [s for s in report.steps if s.structure == piece.structure]
            kind = "breakpoint" if users and users[0].is_breakpoint else "piece"
            name = f"{graph.name}/{kind}_{piece.structure if piece.key is None else piece.key[:12]}"
            steps = first_of([s.name for s in users] or ["no step"])
            self.folder.write(f"{name}.py", piece.code, f"{steps}: {piece.source}")
            code = None if piece.key is None else generated_code(piece.key)
            if code is not None:
                self.folder.write(f"{name}_inductor.py", code, "what Inductor made of it")

    def _write_index(self) -> None:
        for graph in self._graphs:
            if graph.report is not None:
                facts = json.dumps(resolution(graph.report), indent=1)
                self.folder.write(f"{graph.name}/resolution.json", facts, "modes, sizes and reasons, in order")
                self.folder.write(f"{graph.name}/report.txt", str(graph.report), "the report")
            _name_captures(graph)
            if graph.captures:
                self.folder.write(f"{graph.name}/captures.json", json.dumps(graph.captures, indent=1), "every capture")
        titles = {g.name: g.report.name if g.report is not None else "not compiled" for g in self._graphs}
        self.folder.write("index.md", index_page(self.folder, titles), "this page")


def _name_captures(graph: _Graph) -> None:
    """Captures bear the names that the report gives them, which come right after them."""
    if graph.report is None:
        return
    new = [s for s in (*graph.report.sizes, *graph.report.dropped) if all(s is not known for known in graph.sizes)]
    unnamed = [capture for capture in graph.captures if not capture["variant"]]
    for capture, size in zip(unnamed, new, strict=False):
        capture["variant"] = size.descriptor
        graph.sizes.append(size)


_of_process: list[Dump] = []


def dump_if_asked() -> None:
    """Begin the dump that MRV2_DUMP asks for, once a process; it ends with the process."""
    asked = environment_dump_dir()
    if asked is None or _of_process:
        return
    try:
        dumping = Dump(DumpFolder.open(asked.resolve() / f"process_{os.getpid()}"))
    except OSError as error:
        logger.warning("MRV2_DUMP is ignored: %s", error)
        _of_process.append(Dump(DumpFolder(asked)))
        return
    _of_process.append(dumping)
    dumping.bytecode.open()
    observers.append(dumping)
    atexit.register(dumping.close)
