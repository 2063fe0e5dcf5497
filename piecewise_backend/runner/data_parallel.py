"""Agreement between ranks that serve requests of their own with the same model, in step.

A model with collectives in it (experts spread over ranks) needs every rank to run every step, at one size and in one
mode. Ranks tell each other what they have before each step; each then decides the same from the same facts.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from piecewise_backend.cudagraph.modes import BatchDescriptor
from piecewise_backend.runner.config import RunnerConfig


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What decides how a step is served."""

    num_tokens: int
    num_reqs: int
    uniform_query_len: int | None
    """See `InputBatch.uniform_query_len`."""


class DataParallel:
    """The data-parallel ranks of a process group.

    group: an initialised `torch.distributed` group, None for the default one. A gloo group keeps the agreement off
    the GPU; with NCCL each step waits for the device once.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "data parallelism needs torch.distributed: call torch.distributed.init_process_group(...) first"
            )
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        on_gpu = dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def agree(self, mine: StepFacts) -> StepFacts:
        """The facts that all ranks go by in this step; every rank gets the same. A collective call.

        The largest numbers of tokens and requests; uniform decode only if it is on every rank that has a request. An
        idle rank gives zeros; zeros come back where all are idle.
        """
        row = torch.tensor([mine.num_tokens, mine.num_reqs, mine.uniform_query_len or 0], device=self._device)
        rows = torch.empty(self.world_size * len(row), dtype=row.dtype, device=self._device)
        dist.all_gather_into_tensor(rows, row, group=self.group)
        busy = [given for given in rows.view(self.world_size, -1).tolist() if given[0]]
        if not busy:
            return StepFacts(0, 0, None)
        query_lens = {given[2] for given in busy}
        uniform = query_lens.pop() if len(query_lens) == 1 else 0
        return StepFacts(max(g[0] for g in busy), max(g[1] for g in busy), uniform or None)

    def agree_on_start(self, config: RunnerConfig, captured: Set[BatchDescriptor]) -> Set[BatchDescriptor]:
        """The variants that every rank has captured. A collective call; ValueError where limits differ."""
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, (config, set(captured)), group=self.group)
        for rank, (other, _) in enumerate(everyone):
            if other != everyone[0][0]:
                raise ValueError(
                    f"data-parallel ranks need the same limits: rank 0 has {everyone[0][0]}, rank {rank} has {other}"
                )
        return set.intersection(*(found for _, found in everyone))
