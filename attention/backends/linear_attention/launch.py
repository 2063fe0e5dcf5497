"""Launches of the gated delta rule's kernels: grids and tiles, as fixed functions of padded sizes and shapes."""

from __future__ import annotations

from typing import Any

import torch
import triton

from attention.backends.linear_attention.kernels import scan_kernel, short_kernel, solve_kernel
from attention.backends.linear_attention.step import Step


def step_short_requests(step: Step) -> None:
    """One step of the requests with at most N query tokens; the launch depends on padded sizes alone.

    Tensors of fp32, fp16 or bf16, with last dimensions contiguous, log_decay's and beta's excepted.
    """
    _check_contiguous(step)
    (num_v_heads, size_v), size_k = step.value.shape[1:], step.key.shape[2]
    block_k = _padded(size_k)
    block_v = min(_padded(size_v), 64, max(32, 4096 // block_k))  # the state lies in registers
    num_reqs = step.seq_lens.shape[0]
    if num_reqs == 0:
        return
    tokens = (step.query, step.key, step.value, step.log_decay, step.beta)
    short_kernel[(num_reqs, num_v_heads, triton.cdiv(size_v, block_v))](
        *(*tokens, step.recurrent_state, step.out),
        *(step.query_start_loc, step.seq_lens, step.state_slots, step.scale),
        *_outer_strides(*tokens, step.out),
        *step.recurrent_state.stride()[:4],
        NUM_STATES=step.recurrent_state.shape[1],
        GROUP=num_v_heads // step.key.shape[1],
        SIZE_K=size_k,
        SIZE_V=size_v,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=4,
    )


def step_long_requests(step: Step, chunk_plan: torch.Tensor, request_plan: torch.Tensor, *, chunk_size: int) -> None:
    """One step of the requests in `request_plan`, which have more than N query tokens.

    chunk_plan: [chunks, 2], request_plan: [requests, 2], both at least one row, int32, contiguous: see
    `LinearAttentionMetadata`. chunk_size: a power of two of at least 16, tokens. Tensors as in `step_short_requests`.
    """
    _check_contiguous(step)
    num_v_heads, (num_k_heads, size_k) = step.value.shape[1], step.key.shape[1:]
    shapes = {
        "GROUP": num_v_heads // num_k_heads,
        "SIZE_K": size_k,
        "CHUNK": chunk_size,
        # Half precision fits into TF32 whole. For fp32, three products in TF32 are as good as one in fp32, and take no
        # more registers than operands of tensor cores do.
        "PRECISION": "tf32x3" if step.query.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        "num_stages": 1,
    }
    solved = _solve_chunks(step, chunk_plan, shapes)
    _scan_chunks(step, request_plan, solved, shapes)


_Solved = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""solved, scores, decays: see `solve_kernel`."""


def _solve_chunks(step: Step, chunk_plan: torch.Tensor, shapes: dict[str, Any]) -> _Solved:
    num_chunks, num_v_heads, chunk_size = chunk_plan.shape[0], step.value.shape[1], shapes["CHUNK"]
    device = step.key.device
    squares = torch.empty(2, num_chunks, num_v_heads, chunk_size, chunk_size, dtype=torch.float32, device=device)
    decays = torch.empty(num_chunks, num_v_heads, 2, chunk_size, dtype=torch.float32, device=device)
    tokens, results = (step.query, step.key, step.log_decay, step.beta), (*squares, decays)
    solve_kernel[(num_chunks, num_v_heads)](
        *(*tokens, chunk_plan, *results, step.scale),
        *_outer_strides(*tokens),
        BLOCK_K=min(_padded(shapes["SIZE_K"]), 64),
        LEVELS=chunk_size.bit_length() - 1,
        **shapes,
    )
    return results


def _scan_chunks(step: Step, request_plan: torch.Tensor, solved: _Solved, shapes: dict[str, Any]) -> None:
    num_v_heads, size_v = step.value.shape[1:]
    block_v = min(_padded(size_v), 32)
    tokens = (step.query, step.key, step.value)
    scan_kernel[(request_plan.shape[0], num_v_heads, triton.cdiv(size_v, block_v))](
        *(*tokens, step.recurrent_state, step.out, *solved, request_plan),
        *(step.query_start_loc, step.seq_lens, step.state_slots, step.scale),
        *_outer_strides(*tokens, step.out),
        *step.recurrent_state.stride()[:4],
        NUM_STATES=step.recurrent_state.shape[1],
        SIZE_V=size_v,
        BLOCK_K=_padded(shapes["SIZE_K"]),
        BLOCK_V=block_v,
        **shapes,
    )


def _check_contiguous(step: Step) -> None:
    for name in ("query", "key", "value", "recurrent_state", "out"):
        tensor = getattr(step, name)
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"linear attention needs {name}'s last dimension contiguous (call .contiguous()), got strides "
                f"{tensor.stride()}"
            )


def _outer_strides(*tensors: torch.Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]


def _padded(size: int) -> int:
    """The least power of two that a matrix product takes."""
    return max(16, triton.next_power_of_2(size))
