"""Traced programs on disk, so that a start that finds its model unchanged needs no Dynamo.

A file holds a program after merging and splitting, and all that its trace depended on. Its name has the key of what is
known before tracing (the model's state, versions, options); the rest (Dynamo's guards, files of the traced code) is
compared with the live model before the program is believed. Plain data only: reading a file runs nothing of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from piecewise_backend.compile import PieceCompiler
from piecewise_backend.config import Options
from piecewise_backend.data_files import files_of, read_data, write_data
from piecewise_backend.merge_linears import Merged, join
from piecewise_backend.program import Program
from piecewise_backend.reasons import FallbackError, Reason, ReasonCode, Reasons
from piecewise_backend.reporting.report import Report
from piecewise_backend.runner.description import Describer, Undescribable
from piecewise_backend.runner.guard_record import Check, GuardRecord, first_failed
from piecewise_backend.runner.model_text import are_separate, model_text
from piecewise_backend.runner.places import NotRecordable, Places, Unreachable
from piecewise_backend.runner.recipe import PieceMissing, read_recipe, write_recipe
from piecewise_backend.runner.symbolic import NotPlain
from piecewise_backend.runner.trace_key import may_be_kept, trace_key
from piecewise_backend.runner.traced_code import changed_code, code_files, operator_texts

logger = logging.getLogger(__name__)

_NOT_KEPT = (NotRecordable, Undescribable, Unreachable, NotPlain)


@dataclass(frozen=True, slots=True)
class Traced:
    """A program and the real values of its inputs: at full length where they do not depend on the number of tokens."""

    program: Program
    report: Report
    args: tuple[Any, ...]


class TraceCache:
    """One trace on disk: `find` its program, or trace with `guard_filter` and `note_graph`, and `keep` what comes."""

    def __init__(
        self, model: nn.Module, views: Sequence[torch.Tensor], options: Options, scope: Mapping[str, Any]
    ) -> None:
        """`scope`: the globals that Dynamo's sources name."""
        self.options = options
        self.folder = options.cache_dir / "programs"
        self.reasons: list[Reason] = []
        """For the report of what is found or traced."""
        self.roots = {"model": model, "args": tuple(views)}
        self.describe = Describer()
        self.places = Places(self.roots)
        self.record = GuardRecord(self.places, self.describe, scope)
        self.codes: list[Any] = []
        self.sources: list[Any] = []
        self.operators: dict[str, str] = {}
        self.key = self._key(views)

    def _key(self, views: Sequence[torch.Tensor]) -> str | None:
        if (obstacle := may_be_kept()) is not None:
            self._not_kept(obstacle)
            return None
        try:
            pieces = PieceCompiler.from_options(self.options, Reasons()).key("program")
            self.text = model_text(self.roots, self.describe)
            return trace_key(self.text, views, self.options, pieces)
        except (Undescribable, RecursionError) as error:
            self._not_kept(str(error))
            return None

    # Reading.

    def find(self) -> Traced | None:
        """The program of an earlier trace that this one would repeat; None, with a reason where there was a file."""
        stale: str | None = None
        for path in self._files():
            try:
                recipe = read_data(path)
                stale = self._why_stale(recipe)
                if stale is None:
                    traced = self._rebuild(recipe)
                    with contextlib.suppress(OSError):  # a folder that is read only
                        os.utime(path)
                    return traced
            except FallbackError:  # as the report of a trace would raise it
                raise
            except PieceMissing as error:
                stale = str(error)
            except Exception as error:
                self._unreadable(path, error)
        if stale is not None:
            detail = f"{stale}; traced again"
            self.reasons.append(Reason(ReasonCode.PROGRAM_STALE, "traced program", detail))
        return None

    def _files(self) -> Sequence[Path]:
        if self.key is None:
            return []
        return files_of(self.folder, self.key)

    def _why_stale(self, recipe: Mapping[str, Any]) -> str | None:
        places = Places(self.roots, recipe["places"])
        checks = [Check(*row) for row in recipe["checks"]]
        changed = changed_code(recipe["files"], recipe["operators"], self.describe)
        return changed or first_failed(checks, places, self.describe)

    def _rebuild(self, recipe: Mapping[str, Any]) -> Traced:
        reasons = Reasons(on_fallback=self.options.on_fallback)
        program, report = read_recipe(recipe, PieceCompiler.from_options(self.options, reasons), self.options.mode)
        places = Places(self.roots, recipe["places"])
        # Merging last: it changes the model.
        args = tuple(
            join([places.get(p) for p in source]) if isinstance(source, list) else places.get(source)
            for source in recipe["sources"]
        )
        logger.info("%s: traced program read from disk", report.name)
        return Traced(program, report, args)

    def _unreadable(self, path: Path, error: Exception) -> None:
        hint = f"nothing to do, if it does not come again; {self.folder} may be deleted at any time"
        detail = f"{type(error).__name__}: {error}; traced again"
        self.reasons.append(Reason(ReasonCode.ARTIFACT_UNREADABLE, f"traced program {path.name[:12]}", detail, hint))

    # Writing.

    def guard_filter(self, entries: Sequence[Any]) -> list[bool]:
        """For `torch.compile`: keeps no guard, and takes note of all."""
        return self.record.record(entries) if self.key is not None else [False] * len(entries)

    def note_graph(self, gm: fx.GraphModule) -> None:
        """Take note of what Dynamo made, before anything is done to it; to be called by the backend."""
        if self.key is None:
            return
        self.codes = list(torch._guards.TracingContext.get_traced_code() or ())
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self.sources = [getattr(n.meta.get("grapharg"), "source", None) for n in placeholders]
        try:
            self.operators = operator_texts(gm, self.describe)
        except _NOT_KEPT as error:
            self.record.obstacle = str(error)

    def keep(self, traced: Traced, sources: Sequence[int | Merged]) -> None:
        """Write a program that was traced while this looked on. `sources`: where its inputs come from."""
        if self.key is None:
            return
        try:
            self._check_keepable(traced)
            recipe = self._recipe(traced, sources)
            write_data(self.folder, self.key, recipe)
        except (*_NOT_KEPT, OSError, RecursionError) as error:
            self._not_kept(str(error))

    def _check_keepable(self, traced: Traced) -> None:
        if self.record.obstacle is not None:
            raise NotRecordable(self.record.obstacle)
        if model_text(self.roots, Describer()) != self.text:
            raise NotRecordable("the model, which is changed by calling it")
        if _apart_in_one_storage(traced):
            raise NotRecordable("parameters that are parts of one storage")  # the model's text takes them for separate
        compiler = PieceCompiler.from_options(self.options, Reasons())
        for piece in traced.program.pieces:
            if not compiler.is_on_disk(piece.key):
                raise NotRecordable(f"piece {piece.key[:12]}, which is not on disk itself")

    def _recipe(self, traced: Traced, sources: Sequence[int | Merged]) -> dict[str, Any]:
        """All facts about one trace."""
        numbers = [self._source_place(s) for s in sources]
        files = code_files(self.codes, self.describe)
        return {
            **write_recipe(traced.program, traced.report),
            "sources": numbers,
            "files": files,
            "operators": self.operators,
            "checks": [dataclasses.astuple(check) for check in self.record.checks],
            "places": self.places.rows,
        }

    def _source_place(self, source: int | Merged) -> int | list[int]:
        if isinstance(source, Merged):
            return [self._place(i) for i in source.places]
        return self._place(source)

    def _place(self, index: int) -> int:
        if self.sources[index] is None:
            raise NotRecordable(f"input {index} of the graph, which has no source")
        place = self.places.of_source(self.sources[index], self.record.scope)
        self.places.get(place)
        return place

    def _not_kept(self, what: str) -> None:
        self.reasons.append(Reason(ReasonCode.PROGRAM_NOT_KEPT, "traced program", f"depends on {what}"))


def _apart_in_one_storage(traced: Traced) -> bool:
    """Whether parameters were traced as sharing memory though they do not overlap."""
    shared: dict[int, list[torch.Tensor]] = {}
    for given, value in zip(traced.program.inputs, traced.args, strict=True):
        if isinstance(value, torch.nn.Parameter) and given.storage >= 0:
            shared.setdefault(given.storage, []).append(value)
    return any(len(tensors) > 1 and are_separate(tensors) for tensors in shared.values())
