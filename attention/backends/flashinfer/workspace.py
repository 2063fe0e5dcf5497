"""Device memory that plans and split sequences take: how much, and one piece of it for all groups."""

from __future__ import annotations

import torch

from attention.specs import AttentionSpec

_LEAST_BYTES = 128 << 20
"""FlashInfer's own recommendation."""
_BLOCKS_PER_SM = 32
"""No GPU runs more blocks on one multiprocessor."""

_workspaces: dict[torch.device, torch.Tensor] = {}


def shared_workspace(device: torch.device, num_bytes: int) -> torch.Tensor:
    """[>= num_bytes] uint8 on `device`: where split sequences leave their partial results, within one launch.

    One for all groups, since launches run one after another. Should it turn out too small, later wrappers get a larger
    one; the smaller stays with the wrappers, and so with the graphs, that hold it. Doubling bounds what is left behind.
    """
    if device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    workspace = _workspaces.get(device)
    if workspace is None or workspace.numel() < num_bytes:
        size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        workspace = _workspaces[device] = torch.zeros(size, dtype=torch.uint8, device=device)
    return workspace


def split_bytes(spec: AttentionSpec, *, num_sms: int, num_reqs: int = 0, num_rows: int = 0) -> int:
    """Bytes of workspace that plans for graphs of up to `num_rows` query rows take; plain plans, where none are given.

    As the library's planner has it (include/flashinfer/attention/scheduler.cuh): a partial result in fp32, and its
    normalizer, for each row of each tile. Plain plans split only as long as two blocks a multiprocessor suffice; those
    for graphs always do, and have a tile for the odd rows of each request.
    """
    tile, tiles = _tiles(spec, num_sms, num_reqs, num_rows)
    return spec.num_heads * tiles * tile * (spec.head_size + 1) * 4 + 64


def plan_bytes(spec: AttentionSpec, *, num_sms: int, num_reqs: int, num_rows: int) -> int:
    """Bytes that a plan for graphs takes at most: less than 16 a block, 4 a request, 4 a row, and some to align."""
    _, tiles = _tiles(spec, num_sms, num_reqs, num_rows)
    return 16 * (tiles + _BLOCKS_PER_SM * num_sms) + 8 * (num_reqs + num_rows) + 4096


def _tiles(spec: AttentionSpec, num_sms: int, num_reqs: int, num_rows: int) -> tuple[int, int]:
    """(rows of a tile: query tokens times query heads of a KV head, tiles of a KV head at most)."""
    group = spec.num_heads // spec.num_kv_heads
    longest = (num_rows - num_reqs + 1) * group  # where all other requests have one row
    largest = 128 if spec.head_size < 256 else 64
    if num_rows < num_reqs or num_rows == 0:
        tile = largest
    else:
        tile = min(largest, 16 if longest <= 16 else 64 if longest <= 64 else 128)
    return tile, max(2 * num_sms // spec.num_kv_heads, -(-num_rows * group // tile) + num_reqs)
