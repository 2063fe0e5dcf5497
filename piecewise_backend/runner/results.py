"""What a runner's model must give: a row of hidden states for each token, and a row of logits for each of those."""

from __future__ import annotations

from typing import Any

import torch

from piecewise_backend.runner.trace import BoundProgram


def check_result(bound: BoundProgram, model: str) -> None:
    """ValueError unless a model's result is one tensor with a row for each token."""
    fakes = bound.program.output_fakes
    shapes = [f"[{', '.join(map(str, f.shape))}]" if isinstance(f, torch.Tensor) else repr(f) for f in fakes]
    if len(fakes) == 1 and isinstance(fakes[0], torch.Tensor) and fakes[0].dim() == 2:
        tokens = next(i.fake.shape[0] for i in bound.program.inputs if bound.dim.dims(i.fake))
        if str(fakes[0].shape[0]) == str(tokens):
            return
    raise ValueError(
        f"{model}.forward must return one tensor [T, H], a row for each of the T tokens, got {len(fakes)} values: "
        f"{', '.join(shapes) or 'none'} (s.. stands for T); wrap the model in a module that returns the hidden states "
        "alone. A tensor that forward assigns to an attribute or keeps in a list counts as a value: write to a buffer "
        "in place instead"
    )


def checked_logits(logits: Any, num_rows: int, model: str) -> torch.Tensor:
    """`logits`, [num_rows, V]. ValueError for anything else."""
    if isinstance(logits, torch.Tensor) and logits.dim() == 2 and len(logits) == num_rows:
        return logits
    got = f"[{', '.join(map(str, logits.shape))}]" if isinstance(logits, torch.Tensor) else repr(logits)[:80]
    raise ValueError(
        f"{model}.compute_logits must return logits [R, V], a row for each of its R rows; for {num_rows} rows it gave "
        f"{got}"
    )
