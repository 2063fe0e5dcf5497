"""The gated delta rule token by token in plain PyTorch: what runs on the CPU, and the kernels' oracle."""

from __future__ import annotations

import torch


def gated_delta_rule(
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
    """One step of every request, one after another, in fp32 (https://arxiv.org/abs/2412.06464, equation 10).

    query, key: [num_tokens, Hk, Dk]; value, out: [num_tokens, Hv, Dv]; log_decay, beta: [num_tokens, Hv]; any
    dtypes and strides. recurrent_state: [num_slots, N, Hv, Dk, Dv] fp32, updated in place: the state after the
    token at position p goes to p % N, for every token of a request with at most N query tokens, else for the last
    alone. query_start_loc: [num_reqs + 1] int32; seq_lens, state_slots: [num_reqs] int32. All on one device.

    Lengths and slots are read when this runs. Rows of `out` that belong to no request with a slot are left alone.
    """
    num_states = recurrent_state.shape[1]
    starts, slots = query_start_loc.tolist(), state_slots.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, end, slot = starts[request], starts[request + 1], slots[request]
        if first == end or slot < 0:
            continue
        computed = seq_len - (end - first)
        states = recurrent_state[slot]
        state = states[(computed - 1) % num_states] if computed > 0 else torch.zeros_like(states[0])
        for token in range(first, end):
            inputs = (query[token], key[token], value[token], log_decay[token], beta[token])
            state, result = _one_token(state, *inputs, scale=scale)
            out[token] = result
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
