"""Input tokens that are still on the device: sampled in the step before, not yet known to the host."""

from __future__ import annotations

import torch
from torch import nn

from piecewise_backend.runner.buffers import InputBuffers


class WithNewestTokens(nn.Module):
    """A model that takes -1 for the newest token of a request. Compiled with it, so the look-up costs no kernel."""

    token_request: torch.Tensor
    state_slots: torch.Tensor
    last_tokens: torch.Tensor

    def __init__(self, model: nn.Module, buffers: InputBuffers) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("token_request", buffers.token_request.gpu, persistent=False)
        self.register_buffer("state_slots", buffers.state_slots.gpu, persistent=False)
        self.register_buffer("last_tokens", buffers.last_tokens, persistent=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # Padded tokens are request -1 and requests without a slot -1: any entry will do for them.
        requests = self.token_request[: input_ids.shape[0]].clamp(min=0)
        newest = self.last_tokens[self.state_slots[requests].clamp(min=0)]
        return self.model(torch.where(input_ids < 0, newest, input_ids), positions)
