"""Writes of new keys and values to a paged cache, on the CPU: plainly, and by Triton's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention.ops import write_kv_cache as write_kv_cache_op
from tests.attention.backend_cases import skip_without_interpreter


def write_with_op(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    write_kv_cache_op(key, value, kv_cache, slot_mapping)


def write_with_triton(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    skip_without_interpreter()
    from attention.backends.triton import write_kv_cache

    write_kv_cache(key, value, kv_cache, slot_mapping)


writers = pytest.mark.parametrize("write", [write_with_op, write_with_triton], ids=["torch", "triton"])


@writers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_kv_heads", "head_size"), [(2, 64), (3, 80), (17, 256)], ids=["2x64", "3x80", "17x256"])
def test_each_token_goes_to_its_slot_and_no_other_byte_of_the_cache_changes(
    write: Any, dtype: torch.dtype, num_kv_heads: int, head_size: int
) -> None:
    num_tokens, width = 5, num_kv_heads * head_size
    # Slices of a fused projection; two tokens have slots of -1, and there are more slots than tokens.
    fused = torch.randn(num_tokens, 64 + 2 * width).to(dtype)
    key = fused[:, 64 : 64 + width].view(num_tokens, num_kv_heads, head_size)
    value = fused[:, 64 + width :].view(num_tokens, num_kv_heads, head_size)
    slots = torch.tensor([17, -1, 0, 79, -1, 33, 34])
    kv_cache = torch.randn(5, 2, 16, num_kv_heads, head_size).to(dtype)
    expected = kv_cache.clone()
    for token, slot in enumerate(slots[:num_tokens].tolist()):
        if slot >= 0:
            expected[slot // 16, 0, slot % 16] = key[token]
            expected[slot // 16, 1, slot % 16] = value[token]
    write(key, value, kv_cache, slots)
    assert torch.equal(kv_cache, expected)


@writers
def test_a_batch_without_tokens_writes_nothing(write: Any) -> None:
    kv_cache = torch.randn(2, 2, 16, 1, 64)
    before = kv_cache.clone()
    write(torch.empty(0, 1, 64), torch.empty(0, 1, 64), kv_cache, torch.tensor([3, 4]))
    assert torch.equal(kv_cache, before)
