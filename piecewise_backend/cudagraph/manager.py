"""The captured variants of one program: capture them all, then find and replay the one a batch needs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from rich.progress import Progress

from attention.base import UncapturableMetadata
from piecewise_backend.cudagraph.capture import CapturedProgram, capture_session, failure_reason
from piecewise_backend.cudagraph.dispatch import Dispatcher
from piecewise_backend.cudagraph.fingerprint import check_all
from piecewise_backend.cudagraph.modes import BatchDescriptor
from piecewise_backend.cudagraph.recorder import GraphRecorder
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.report import Report, SizeReport

logger = logging.getLogger(__name__)

CreateForwardFn = Callable[[BatchDescriptor, bool], Callable[[], CapturedProgram | None]]
"""(descriptor, warmup) to a function that runs the model once for it: a plain run to warm up, else a recording."""


class CudaGraphManager:
    """Owns the captured programs. Until `capture`, and where a size failed, batches find no descriptor."""

    def __init__(self, recorder: GraphRecorder | None, report: Report) -> None:
        self.recorder = recorder
        self.report = report
        self._captured: dict[BatchDescriptor, tuple[CapturedProgram, SizeReport]] = {}
        self._dispatcher = Dispatcher(())

    def capture(self, descriptors: Sequence[BatchDescriptor], create_forward_fn: CreateForwardFn) -> None:
        """Record every descriptor, in the order given (largest first, so smaller ones reuse its memory).

        Fresh metadata is built for warm-up and again for the recording. A size that fails is dropped alone.
        """
        if self.recorder is None or not descriptors:
            return
        with capture_session(self.recorder), Progress(transient=True, disable=not _on_terminal()) as progress:
            for descriptor in progress.track(descriptors, description="capturing graphs"):
                self._capture_one(descriptor, create_forward_fn)
        self._dispatcher = Dispatcher(self._captured)
        logger.info("captured %d of %d variants", len(self._captured), len(descriptors))

    def _capture_one(self, descriptor: BatchDescriptor, create_forward_fn: CreateForwardFn) -> None:
        try:
            create_forward_fn(descriptor, True)()
            captured = create_forward_fn(descriptor, False)()
        except UncapturableMetadata:
            raise  # start-up resolves anew
        except Exception as error:
            self.report.reasons.add(failure_reason(error, str(descriptor)))
            return
        assert captured is not None, "a recording returned nothing"
        size = captured.size_report(str(descriptor), descriptor.num_tokens)
        self.report.sizes.append(size)
        self._captured[descriptor] = (captured, size)

    def keep_only(self, descriptors: Set[BatchDescriptor]) -> None:
        """Give up every captured variant that is not among `descriptors`, with a reason."""
        for descriptor in [d for d in self._captured if d not in descriptors]:
            _, size = self._captured.pop(descriptor)
            self.report.drop(size)
            self.report.reasons.add(
                Reason(
                    ReasonCode.NOT_ON_ALL_RANKS,
                    str(descriptor),
                    "was not captured on every data-parallel rank, so none uses it",
                    "see the other ranks' reports for why it failed there",
                )
            )
        self._dispatcher = Dispatcher(self._captured)

    def dispatch(self, num_tokens: int, num_reqs: int, uniform_query_len: int | None) -> BatchDescriptor | None:
        """The captured descriptor for a batch; None: run without graphs."""
        return self._dispatcher.dispatch(num_tokens, num_reqs, uniform_query_len)

    def replay(self, descriptor: BatchDescriptor, num_tokens: int, metadata: Mapping[str, Any]) -> tuple[Any, ...]:
        """Replay on the persistent buffers as they are now. Outputs are views, valid until the next replay.

        `metadata`: this step's, by layer; StaleMetadata where a recorded operator would not read it.
        """
        captured, size = self._captured[descriptor]
        check_all(captured.fingerprints, metadata)
        size.replays += 1
        size.padded_rows += descriptor.num_tokens - num_tokens
        return captured.replay()

    @property
    def captured(self) -> dict[BatchDescriptor, CapturedProgram]:
        """What is captured, by descriptor."""
        return {descriptor: captured for descriptor, (captured, _) in self._captured.items()}


def _on_terminal() -> bool:
    with contextlib.suppress(AttributeError, ValueError):
        import sys

        return sys.stderr.isatty()
    return False
