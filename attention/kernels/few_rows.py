"""Matrix products of a few rows: each weight is read once, as fast as memory gives it.

A step that decodes a few requests is made of such products. Each takes microseconds, most of them spent waiting: for
the kernel before, and for the first bytes. So a program computes its columns from beginning to end (no second kernel
adds up parts), and loads its first weights, which no kernel before it writes, while the kernel before still runs
(OVERLAP, see overlap.py).
"""

# mypy: disallow-incomplete-defs=False, check-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.overlap import follow_predecessor


@triton.jit
def one_row_kernel(
    x,
    weight,
    bias,
    out,
    num_columns,
    depth,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out [N] = weight [N, K] @ x [K] + bias [N], all contiguous: BLOCK_N columns a program.

    Without tensor cores: products and sums are float32.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = columns < num_columns
    offsets = tl.arange(0, BLOCK_K)
    rows = weight + columns[:, None].to(tl.int64) * depth + offsets[None, :]
    ahead = tl.load(rows, mask=real[:, None] & (offsets < depth)[None, :], other=0.0)
    if OVERLAP:
        follow_predecessor()
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in range(0, depth, BLOCK_K):
        now = ahead
        there = start + BLOCK_K + offsets < depth
        ahead = tl.load(rows + start + BLOCK_K, mask=real[:, None] & there[None, :], other=0.0)
        part = tl.load(x + start + offsets, mask=start + offsets < depth, other=0.0)
        total += now.to(tl.float32) * part.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_columns,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out [M, N] = x [M, K] @ weight [N, K].T + bias [N], all contiguous, M <= BLOCK_M: BLOCK_N columns a program.

    So few rows and columns occupy one warp. SLICES tiles of BLOCK_K, next to each other along K, are therefore
    multiplied at a time, by different warps, and their sums added up at the end.
    """
    row = tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, SLICES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    x_tile = x + row[None, :, None] * depth + k[:, None, :]
    weight_tile = weight + columns[None, None, :].to(tl.int64) * depth + k[:, :, None]
    real_rows = row[None, :, None] < num_rows
    real_columns = columns[None, None, :] < num_columns
    ahead = tl.load(weight_tile, mask=real_columns & (k < depth)[:, :, None], other=0.0)
    if OVERLAP:
        follow_predecessor()
    first = tl.load(x_tile, mask=real_rows & (k < depth)[:, None, :], other=0.0)
    total = tl.dot(first, ahead)
    for start in tl.range(SLICES * BLOCK_K, depth, SLICES * BLOCK_K, num_stages=STAGES):
        there = k < depth - start
        w = tl.load(weight_tile + start, mask=real_columns & there[:, :, None], other=0.0)
        part = tl.load(x_tile + start, mask=real_rows & there[:, None, :], other=0.0)
        total = tl.dot(part, w, total)
    result = tl.sum(total, 0)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
    where = row[:, None] * num_columns + columns[None, :]
    real = (row < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(out + where, result.to(out.dtype.element_ty), mask=real)
