"""The tensors of one step of linear attention, as its reference and its kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """New tokens of every request, the states that they update, and where the results go. All on one device.

    query_start_loc: [num_reqs + 1] int32; seq_lens, state_slots: [num_reqs] int32. Requests without a slot (-1) are
    inert: their states and their rows of `out` are left alone.
    """

    query: torch.Tensor
    """[num_tokens, Hk, Dk], like `key`."""
    key: torch.Tensor
    value: torch.Tensor
    """[num_tokens, Hv, Dv], like `out`."""
    log_decay: torch.Tensor
    """[num_tokens, Hv], like `beta`."""
    beta: torch.Tensor
    recurrent_state: torch.Tensor
    """[num_slots, N, Hv, Dk, Dv] fp32: the state after the token at position p goes to p % N, for every token of a
    request with at most N query tokens, else for the last alone."""
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    state_slots: torch.Tensor
    out: torch.Tensor
    scale: float
