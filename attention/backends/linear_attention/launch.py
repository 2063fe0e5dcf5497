"""Launches of the gated delta rule's kernels: grids and tiles, as fixed functions of padded sizes and shapes."""

from __future__ import annotations

import torch
import triton

from attention.backends.linear_attention.kernels import scan_kernel, short_kernel, solve_kernel


def step_short_requests(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    recurrent_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    state_slots: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """One step of the requests with at most N query tokens; the launch depends on padded sizes alone.

    Arguments as in `reference.gated_delta_rule`, of fp32, fp16 or bf16, with last dimensions contiguous, log_decay's
    and beta's excepted.
    """
    _check_contiguous(query=query, key=key, value=value, recurrent_state=recurrent_state, out=out)
    (num_v_heads, size_v), size_k = value.shape[1:], key.shape[2]
    block_k = _padded(size_k)
    block_v = min(_padded(size_v), 64, max(32, 4096 // block_k))  # the state lies in registers
    num_reqs = seq_lens.shape[0]
    if num_reqs == 0:
        return
    short_kernel[(num_reqs, num_v_heads, triton.cdiv(size_v, block_v))](
        query,
        key,
        value,
        log_decay,
        beta,
        recurrent_state,
        out,
        query_start_loc,
        seq_lens,
        state_slots,
        scale,
        *_outer_strides(query, key, value, log_decay, beta, out),
        *recurrent_state.stride()[:4],
        NUM_STATES=recurrent_state.shape[1],
        GROUP=num_v_heads // key.shape[1],
        SIZE_K=size_k,
        SIZE_V=size_v,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=4,
    )


def step_long_requests(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    recurrent_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    state_slots: torch.Tensor,
    chunk_plan: torch.Tensor,
    request_plan: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    chunk_size: int,
) -> None:
    """One step of the requests in `request_plan`, which have more than N query tokens.

    chunk_plan: [chunks, 2], request_plan: [requests, 2], both at least one row, int32, contiguous: see
    `LinearAttentionMetadata`. chunk_size: a power of two of at least 16, tokens. Others as in `step_short_requests`.
    """
    _check_contiguous(query=query, key=key, value=value, recurrent_state=recurrent_state, out=out)
    (num_v_heads, size_v), (num_k_heads, size_k) = value.shape[1:], key.shape[1:]
    num_chunks, num_reqs = chunk_plan.shape[0], request_plan.shape[0]
    squares = torch.empty(2, num_chunks, num_v_heads, chunk_size, chunk_size, dtype=torch.float32, device=key.device)
    solved, scores = squares
    decays = torch.empty(num_chunks, num_v_heads, 2, chunk_size, dtype=torch.float32, device=key.device)
    shapes = {
        "GROUP": num_v_heads // num_k_heads,
        "SIZE_K": size_k,
        "CHUNK": chunk_size,
        # Half precision fits into TF32 whole. For fp32, three products in TF32 are as good as one in fp32, and take no
        # more registers than operands of tensor cores do.
        "PRECISION": "tf32x3" if query.dtype == torch.float32 else "tf32",
        "num_stages": 1,
    }
    solve_kernel[(num_chunks, num_v_heads)](
        query,
        key,
        log_decay,
        beta,
        chunk_plan,
        solved,
        scores,
        decays,
        scale,
        *_outer_strides(query, key, log_decay, beta),
        BLOCK_K=min(_padded(size_k), 64),
        LEVELS=chunk_size.bit_length() - 1,
        num_warps=4,
        **shapes,
    )
    block_k = _padded(size_k)
    block_v = min(_padded(size_v), 32)
    scan_kernel[(num_reqs, num_v_heads, triton.cdiv(size_v, block_v))](
        query,
        key,
        value,
        recurrent_state,
        out,
        solved,
        scores,
        decays,
        request_plan,
        query_start_loc,
        seq_lens,
        state_slots,
        scale,
        *_outer_strides(query, key, value, out),
        *recurrent_state.stride()[:4],
        NUM_STATES=recurrent_state.shape[1],
        SIZE_V=size_v,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=4,
        **shapes,
    )


def _check_contiguous(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
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
