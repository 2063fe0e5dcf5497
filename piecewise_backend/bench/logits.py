"""Before anything is timed: are its logits those of the plain model?"""

from __future__ import annotations

from typing import Any

import torch

# Largest |got - expected| / |expected| of one row of logits (2-norms). In bfloat16, two ways to compute Qwen3-0.6B's
# attention differ by 0.015; one wrong token among 28, or positions wrong by one, gives 0.18 and more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}

CHECK_TOKENS, CHECK_PREFILL = 32, 28


def make_prompts(num_reqs: int, length: int, vocab_size: int, *, seed: int) -> torch.Tensor:
    """[num_reqs, length] int64 on the CPU: random tokens, the same for every contender."""
    return torch.randint(vocab_size, (num_reqs, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def expected_logits(model: Any, prompts: torch.Tensor, num_prefill: int) -> torch.Tensor:
    """Logits [num_reqs, T - num_prefill + 1, vocabulary] of `prompts` [num_reqs, T], after its first `num_prefill`
    tokens and each one more: by one plain pass, without a cache."""
    keep = prompts.shape[1] - num_prefill + 1
    return model(prompts.to(model.device), use_cache=False, logits_to_keep=keep).logits


def compare(got: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    """Whether `got` agrees with `expected` (both [..., vocabulary]) as far as their dtype allows, and by how much."""
    if got.shape != expected.shape:
        return {"passed": False, "why": f"logits of shape {tuple(got.shape)}, expected {tuple(expected.shape)}"}
    tolerance = TOLERANCE[expected.dtype]
    a, b = got.float().flatten(0, -2), expected.float().flatten(0, -2)
    worst = float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())  # NaN where any is
    return {
        "passed": worst <= tolerance,
        "worst_relative_error": worst,
        "tolerance": tolerance,
        "rows": len(a),
        "same_most_likely_token": float((a.argmax(-1) == b.argmax(-1)).float().mean()),
    }
