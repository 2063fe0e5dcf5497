"""Who looks on while graphs are compiled and captured: dumps, and nobody as a rule."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch import fx

from piecewise_backend.cudagraph.capture import CapturedProgram
from piecewise_backend.split import SplitGraph

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Is told what happens, on the thread on which it does. What it raises is logged and goes no further."""

    def split(self, gm: fx.GraphModule, graph: SplitGraph) -> None:
        """A graph was split; its pieces are compiled next, which may fail."""

    def compiled(self, program: Any, report: Any) -> None:
        """The `Program` and the `Report` of the graph that was split last on this thread."""

    def captured(self, program: Any, args: Sequence[Any], captured: CapturedProgram) -> None:
        """A `Program` was recorded on `args`; the forward context is that of the recording."""

    def started(self, report: Any) -> None:
        """The graph, or the runner, of this `Report` has its mode and sizes."""


observers: list[Observer] = []


def tell(event: Callable[[Observer], None]) -> None:
    """Call `event` on every observer."""
    for observer in tuple(observers):
        try:
            event(observer)
        except Exception:
            logger.warning("%s failed, and the model goes on without it", type(observer).__name__, exc_info=True)


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """`observer` is told of everything while this is open."""
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)
