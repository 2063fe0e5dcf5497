"""The gated delta rule token by token in plain PyTorch: what runs on the CPU, and the kernels' oracle."""

from __future__ import annotations

import torch

from attention.backends.linear_attention.step import Step


def gated_delta_rule(step: Step) -> None:
    """One step of every request, one after another, in fp32 (https://arxiv.org/abs/2412.06464, equation 10).

    Any dtypes and strides. Lengths and slots are read when this runs. Rows of `out` that belong to no request with a
    slot are left alone.
    """
    num_states = step.recurrent_state.shape[1]
    starts, slots = step.query_start_loc.tolist(), step.state_slots.tolist()
    for request, seq_len in enumerate(step.seq_lens.tolist()):
        first, end, slot = starts[request], starts[request + 1], slots[request]
        if first == end or slot < 0:
            continue
        computed = seq_len - (end - first)
        states = step.recurrent_state[slot]
        state = states[(computed - 1) % num_states] if computed > 0 else torch.zeros_like(states[0])
        for token in range(first, end):
            tokens = (step.query, step.key, step.value, step.log_decay, step.beta)
            state, result = _one_token(state, *(rows[token] for rows in tokens), scale=step.scale)
            step.out[token] = result
            if end - first <= num_states or token == end - 1:
                states[(computed + token - first) % num_states] = state


def _one_token(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next state [Hv, Dk, Dv] and the output [Hv, Dv], both of the state's dtype, from one token's rows."""
    group = value.shape[0] // key.shape[0]
    query = query.to(state.dtype).repeat_interleave(group, 0)  # value head h reads key head h // group
    key = key.to(state.dtype).repeat_interleave(group, 0)
    state = state * log_decay.to(state.dtype).exp()[:, None, None]
    recalled = (state * key[:, :, None]).sum(1)
    change = beta.to(state.dtype)[:, None] * (value.to(state.dtype) - recalled)
    state = state + key[:, :, None] * change[:, None, :]
    return state, scale * (state * query[:, :, None]).sum(1)
