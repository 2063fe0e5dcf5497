"""Where Dynamo breaks graphs in user code: every break of a run, with its operator and line."""

from __future__ import annotations

import contextlib
import linecache
import logging
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from piecewise_backend.dry_run.explanation import Finding
from piecewise_backend.reasons import ReasonCode

_BREAK = re.compile(r"in user code at (?P<file>.+?):(?P<line>\d+)\s*\nGraph Break Reason: (?P<reason>.*)", re.DOTALL)
_LIBRARIES = tuple(f"{Path(file).resolve().parent}/" for file in (str(torch.__file__), str(Path(__file__).parent)))
_HINT = "keep it out of forward, or let the caller do it; what is before and after it becomes graphs of its own"


class _Listener(logging.Handler):
    """Keeps what Dynamo tells `TORCH_LOGS="graph_breaks"`: all breaks, those of frames it skips whole included."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.findings: dict[tuple[str, str], Finding] = {}

    def emit(self, record: logging.LogRecord) -> None:
        found = _BREAK.search(record.getMessage())
        if found is not None:
            finding = break_finding(found["file"], int(found["line"]), found["reason"])
            self.findings.setdefault((finding.place, finding.op), finding)


@contextlib.contextmanager
def listening() -> Iterator[_Listener]:
    """Collect the graph breaks of whatever is compiled inside. Dynamo's own warnings of them are not printed."""
    logger = torch._logging.getArtifactLogger("torch._dynamo.symbolic_convert", "graph_breaks")
    dynamo = logging.getLogger("torch._dynamo")
    listener, before = _Listener(), (logger.level, logger.propagate, dynamo.level)
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    dynamo.setLevel(logging.ERROR)
    try:
        yield listener
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        dynamo.setLevel(before[2])


def break_finding(file: str, line: int, reason: str) -> Finding:
    """A finding of Dynamo's text for one break."""
    headline, explanation, context = _parts(reason)
    return Finding(
        code=ReasonCode.GRAPH_BREAK,
        op=_operator(headline, context),
        place=f"{file}:{line}",
        source=linecache.getline(file, line).strip(),
        why=f"{headline}. {explanation}".rstrip(". ") + ".",
        hint=_HINT,
    )


def line_of(error: BaseException) -> tuple[str, str]:
    """("file:line", code) of the user's innermost line in a traceback; ("", "") where all of it is torch's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
    return (f"{frames[-1].filename}:{frames[-1].lineno}", frames[-1].line or "") if frames else ("", "")


def is_library(filename: str) -> bool:
    """Whether a frame is torch's or this project's, or no file at all."""
    return filename.startswith(("<", *_LIBRARIES))


def _parts(reason: str) -> tuple[str, str, str]:
    """(headline, explanation, developer context) of a reason, whose headline may follow what Dynamo was doing."""
    before, _, after = reason.partition("\n  Explanation: ")
    headline = before.strip().splitlines()[-1].strip() if before.strip() else "graph break"
    explanation = after.partition("\n")[0].strip()
    context = reason.partition("Developer debug context: ")[2].partition("\n")[0].strip()
    return headline, explanation, context


def _operator(headline: str, context: str) -> str:
    """The operator's name, as far as Dynamo gives it."""
    if (method := re.match(r"call_method \w*Tensor\w*\(.*?\) (\w+)", context)) is not None:
        return f"Tensor.{method[1]}"
    if re.fullmatch(r"\w+(\.\w+)+", context):
        return context
    if (builtin := re.match(r"builtin (\w+)", context)) is not None:
        return builtin[1]
    return headline
