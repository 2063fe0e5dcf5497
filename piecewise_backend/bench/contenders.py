"""Who is measured, and what a contender that decodes can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")
PLAIN = ("eager", "inductor", "reduce-overhead")
"""torch's own, in the order in which they are tried."""


class Contender(Protocol):
    """What decodes and prefills; `transformers_loop.EagerLoop` describes each method."""

    def begin(self, num_reqs: int, max_len: int) -> None: ...
    def forced_logits(self, prompts: torch.Tensor, num_prefill: int) -> torch.Tensor: ...
    def prefill(self, prompts: torch.Tensor, new_tokens: int) -> None: ...
    def step(self) -> int: ...
    def finish(self) -> None: ...
    def prefill_step(self, prompts: torch.Tensor) -> Callable[[], torch.Tensor]: ...
    def facts(self) -> dict[str, Any]: ...


class Skipped(Exception):
    """A contender that cannot run here; the message says why."""


def all_right(contenders: dict[str, dict[str, Any]]) -> bool:
    """Whether nothing failed and every output was right."""
    checks = [check for record in contenders.values() for check in _checks(record)]
    return all(check["passed"] for check in checks) and not any("error" in record for record in contenders.values())


def _checks(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for value in record.values():
        if isinstance(value, dict):
            if "passed" in value:
                yield value
            yield from _checks(value)


def default_contenders(device: torch.device) -> tuple[str, ...]:
    """What is worth measuring on a device: without CUDA graphs, every mode is NONE."""
    return (*PLAIN, *MODES) if device.type == "cuda" else ("eager", "inductor", "NONE")


def recorder_for(mode: str, device: torch.device, asked: str | None) -> str:
    """What records for `mode`. Skipped where nothing does: such a mode would be NONE under another name."""
    recorder = asked or ("cuda" if device.type == "cuda" else "none")
    if mode != "NONE" and recorder == "none":
        raise Skipped(
            f"no CUDA graphs on {device}, so this would be NONE; --recorder emulated checks its output, without a time"
        )
    return recorder


def is_emulated(mode: str, recorder: str) -> bool:
    """Whether replays are emulated, so that their time says nothing about speed."""
    return mode != "NONE" and recorder == "emulated"


EMULATED = "output checked; no time, since replays of the emulated recorder say nothing about speed"
