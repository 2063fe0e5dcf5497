"""One size of one program, set up so that it can be run and replayed on the same memory again and again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from piecewise_backend.cudagraph.capture import CapturedProgram
from piecewise_backend.cudagraph.recorder import GraphRecorder
from piecewise_backend.program import Program
from piecewise_backend.verifying.walks import Visible


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What `check` needs of a size; plain calls and runners each make their own."""

    size: str
    """As messages name it."""
    program: Program
    args: list[Any]
    """The memory that a recording reads its inputs from."""
    fill: Callable[[], AbstractContextManager[Any]]
    """Writes the inputs of the check into `args`; the steps run within what it returns."""
    visible: Visible
    """The part of an input that counts: of a paged cache, all but the block that is nobody's."""
    rows: Callable[[Any, Any], Any]
    """(value, traced value) to the real rows of the value."""
    captured: CapturedProgram | None = None
    """None where nothing has been recorded for this size."""
    recorder: GraphRecorder | None = None
    record: Callable[[Program], CapturedProgram] | None = None
    """Records another version of the program for this size, on other values than the check's."""
    before_replay: Callable[[], None] = lambda: None
    """Raises where the recording does not serve these inputs."""

    @property
    def devices(self) -> list[int]:
        """CUDA devices in use, whose random state is kept."""
        found = {a.device.index for a in self.args if isinstance(a, torch.Tensor) and a.device.type == "cuda"}
        return sorted(i for i in found if i is not None)
