"""The keyword arguments that every metadata builder takes, for a builder that has an `__init__` of its own."""

from __future__ import annotations

from typing import TypedDict

import torch


class BuilderLimits(TypedDict):
    """What a `MetadataBuilder` is made for: the largest padded batch, in requests and tokens, and where it lies."""

    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    device: torch.device
