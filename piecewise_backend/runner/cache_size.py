"""How many blocks a paged cache gets where the user does not say."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attention.kv_cache import block_bytes, state_bytes
from attention.specs import LayerSpec
from piecewise_backend.runner.config import RunnerConfig

_CPU_CACHE_BYTES = 2 << 30
_GPU_CACHE_SHARE = 0.85


def affordable_blocks(specs: Mapping[str, LayerSpec], config: RunnerConfig, device: torch.device) -> int:
    """As many as `config.max_num_reqs` requests of full length need, or as memory on `device` allows; at least 1."""
    wanted = config.max_num_reqs * config.blocks_per_request
    each = block_bytes(specs)
    if not each:
        return wanted
    budget = _CPU_CACHE_BYTES
    if device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * _GPU_CACHE_SHARE)
    budget -= config.max_num_reqs * state_bytes(specs)
    return max(1, min(wanted, _rounded_down(budget // each)))


def _rounded_down(count: int) -> int:
    """To five leading bits. Compiled code has the caches' sizes in it: a little more or less free memory than at the
    start before should not make it anew."""
    step = 1 << max(0, count.bit_length() - 5)
    return count // step * step
