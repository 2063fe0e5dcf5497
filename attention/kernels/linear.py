"""`mrv2::linear` on a GPU: the library's matrix product, or for a few rows our own."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton

from attention.kernels.ahead import Launch
from attention.kernels.few_rows import few_rows_kernel, one_row_kernel
from attention.kernels.overlap import overlap_constants

MAX_ROWS = 32
"""Beyond, the library is faster whatever the matrix."""
_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """`columns` columns a program, `depth` of their weights at a time, in each of `slices`."""

    columns: int
    depth: int
    num_warps: int
    slices: int = 1
    num_stages: int = 3


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., K] @ weight [N, K].T + bias [N] -> [..., N] contiguous; x and weight of one dtype, on a GPU."""
    *leading, depth = x.shape
    rows = math.prod(leading)
    flat = x.reshape(rows, depth)
    tile = choose_tile(rows, *weight.shape) if 0 < rows <= MAX_ROWS and _fits(x, weight, bias) else None
    if tile is None:
        if _noted is not None:
            _noted.add((rows, *weight.shape, x.dtype, bias is not None))
        return library_product(flat, weight, bias).view(*leading, weight.shape[0])
    out = x.new_empty(*leading, weight.shape[0])
    kernel, grid, arguments, constants = _launch(flat.contiguous(), weight, bias, out, tile, x.device)
    kernel[grid](*arguments, **constants)
    return out


def library_product(
    flat: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As F.linear does it for flat [M, K], in fewer steps: a start calls this thousands of times. out: [M, N]."""
    if bias is None:
        return torch.mm(flat, weight.t(), out=out)
    return torch.addmm(bias, flat, weight.t(), out=out)


Product = tuple[int, int, int, torch.dtype, bool]
"""M, N and K of a product with a weight [N, K], its dtype, and whether a bias is added."""

_noted: set[Product] | None = None


@contextlib.contextmanager
def noting_library_products() -> Iterator[set[Product]]:
    """Products that are left to the library meanwhile, in any thread; they are in the set as they come."""
    global _noted
    outer, _noted = _noted, set()
    try:
        yield _noted
    finally:
        _noted = outer


def launches_ahead(weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device) -> list[Launch]:
    """Launches, not to be run, of every kernel that products with a weight of this layout need on `device`.

    weight and bias: may be without memory, on the meta device.
    """
    launches = []
    for rows in (1, 2, 17):  # where tiles change
        tile = choose_tile(rows, *weight.shape) if _fits(weight, weight, bias) else None
        if tile is not None:
            x, out = (torch.empty(rows, size, dtype=weight.dtype, device="meta") for size in reversed(weight.shape))
            launches.append(_launch(x, weight, bias, out, tile, device))
    return launches


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the kernels are made for these: others are left to the library."""
    alike = x.dtype == weight.dtype and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    aligned = weight.shape[1] % 8 == 0 and (weight.is_meta or weight.data_ptr() % 16 == 0)
    return alike and aligned and x.dtype in _DTYPES and weight.is_contiguous()


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    device: torch.device,
) -> Launch:
    """x [M, K], M <= MAX_ROWS, into out, whose rows are those of x."""
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    common = {
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "HAS_BIAS": bias is not None,
        "num_warps": tile.num_warps,
        **overlap_constants(device),
    }
    grid = (triton.cdiv(num_columns, tile.columns),)
    bias = weight if bias is None else bias  # an address that is not read
    if num_rows == 1:
        return one_row_kernel, grid, (x, weight, bias, out, num_columns, depth), common
    arguments = (x, weight, bias, out, num_rows, num_columns, depth)
    more = {"BLOCK_M": 16 if num_rows <= 16 else 32, "SLICES": tile.slices, "STAGES": tile.num_stages}
    return few_rows_kernel, grid, arguments, common | more


def choose_tile(num_rows: int, num_columns: int, depth: int) -> Tile | None:
    """The tile for a product of this size, None where the library is faster: a table, since a recording must not
    autotune. Measured on an H200, on the layers of Qwen3-0.6B and Llama-3.1-8B."""
    if num_rows == 1:
        if num_columns <= 2048:  # every multiprocessor gets a program, with all its loads under way at once
            return Tile(columns=4, depth=2048, num_warps=8)
        return Tile(columns=8, depth=512, num_warps=4) if depth <= 1024 else Tile(columns=4, depth=1024, num_warps=4)
    if num_rows > 16:
        if num_columns <= 2048:
            return Tile(columns=8, depth=128, num_warps=4, slices=4)
        narrow = num_columns <= 4096 and depth > 2048
        return Tile(columns=32, depth=128, num_warps=4, slices=4) if narrow else None
    if num_columns <= 2048:
        return Tile(columns=8, depth=256, num_warps=4, slices=4)
    if depth <= 1024:
        return Tile(columns=16, depth=128 if num_columns <= 4096 else 256, num_warps=2, slices=2)
    if num_columns > 8192:
        return None
    if depth > 8192:
        return Tile(columns=32, depth=128, num_warps=4, slices=4)
    return Tile(columns=8 if num_columns <= 4096 else 16, depth=256, num_warps=2, slices=2)
