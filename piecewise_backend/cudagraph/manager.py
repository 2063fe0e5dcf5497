"""The captured variants of one program: capture them all, then find and replay the one a batch needs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from rich.progress import Progress

from attention.base import UncapturableMetadata
from piecewise_backend.cudagraph.budget import choose_probes, drop_to_fit, estimate_bytes
from piecewise_backend.cudagraph.capture import CapturedProgram, capture_session, failure_reason
from piecewise_backend.cudagraph.dispatch import Dispatcher
from piecewise_backend.cudagraph.fingerprint import check_all
from piecewise_backend.cudagraph.modes import BatchDescriptor
from piecewise_backend.cudagraph.recorder import GraphRecorder
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.reporting.records import SizeReport
from piecewise_backend.reporting.report import Report

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

    def capture(
        self,
        descriptors: Sequence[BatchDescriptor],
        create_forward_fn: CreateForwardFn,
        memory_budget: int | None = None,
    ) -> None:
        """Record every descriptor; they come largest first, so that smaller ones reuse the memory of larger ones.

        Fresh metadata is built for warm-up and again for the recording. A size that fails is dropped alone. A few are
        captured first, to estimate what all take; where that is more than `memory_budget` bytes, sizes that save the
        least padding are left out.
        """
        if self.recorder is None or not descriptors:
            return
        probes = choose_probes(descriptors)
        rest = [d for d in descriptors if d not in probes]
        with capture_session(self.recorder), Progress(transient=True, disable=not _on_terminal()) as progress:
            for descriptor in progress.track(probes, description="capturing graphs"):
                self._capture_one(descriptor, create_forward_fn)
            rest = self._within_budget(rest, memory_budget)
            for descriptor in progress.track(rest, description="capturing graphs"):
                self._capture_one(descriptor, create_forward_fn)
        self._dispatcher = Dispatcher(self._captured)
        logger.info("captured %d of %d variants", len(self._captured), len(descriptors))

    def _within_budget(self, rest: list[BatchDescriptor], memory_budget: int | None) -> list[BatchDescriptor]:
        """Those of `rest` that fit beside what is captured; the others are noted in the report."""
        measured = {descriptor: size.memory_bytes for descriptor, (_, size) in self._captured.items()}
        taken, expected = sum(measured.values()), estimate_bytes(rest, measured)
        dropped = []
        if memory_budget is not None:
            dropped = drop_to_fit(rest, measured, expected, memory_budget - taken)
        kept = [d for d in rest if d not in dropped]
        self.report.estimated_graph_bytes += round(taken + sum(expected[d] for d in kept))
        for descriptor in dropped:
            self.report.reasons.add(
                Reason(
                    ReasonCode.GRAPH_MEMORY_BUDGET,
                    str(descriptor),
                    f"left out: all graphs would take about {(taken + sum(expected.values())) / 2**20:.0f} MiB",
                    "raise options={'graph_memory_budget': bytes}, or list fewer capture_sizes",
                )
            )
        return kept

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
        size = captured.size_report(str(descriptor), descriptor.num_tokens, descriptor.kind)
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
