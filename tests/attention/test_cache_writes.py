"""Cache writes as tensor operations do what the operators do, but for a block that is nobody's."""

import pytest
import torch

from attention import cache_writes, ops

SLOTS = torch.tensor([5, -1, 16, 3, -1, 47, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_and_values_land_where_the_operator_puts_them(dtype: torch.dtype) -> None:
    key, value = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    by_operator, by_parts = (torch.full((4, 2, 16, 2, 8), 7.0, dtype=dtype) for _ in range(2))
    ops.write_kv_cache(key, value, by_operator, SLOTS)
    cache_writes.write_kv_cache(key, value, by_parts, SLOTS)
    assert torch.equal(by_operator[:3], by_parts[:3])
    assert (by_operator != 7).any(dim=-1).sum() == 2 * 2 * 4, "four real tokens"


def test_rows_of_any_shape_land_where_the_operator_puts_them() -> None:
    value = torch.randn(7, 5)
    by_operator, by_parts = (torch.zeros(4, 16, 5) for _ in range(2))
    ops.write_cache(value, by_operator, SLOTS)
    cache_writes.write_cache(value, by_parts, SLOTS)
    assert torch.equal(by_operator[:3], by_parts[:3])
    assert by_parts[3, :15].eq(0).all(), "padded tokens write to one entry"
