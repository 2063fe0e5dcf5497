"""Our matrix product for a few rows, compiled for a GPU: against the library's, and overlapped in real CUDA graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from attention.kernels import linear as kernels
from attention.ops import linear

pytestmark = pytest.mark.gpu

SHAPES = [(24, 64), (70, 2056), (1024, 3072), (2100, 72), (4096, 1024), (4096, 4096), (6144, 4096), (4100, 14336)]


def operands(num_rows: int, num_columns: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x = torch.randn(num_rows, depth, device="cuda", dtype=dtype)
    weight = torch.randn(num_columns, depth, device="cuda", dtype=dtype) / depth**0.5
    return x, weight, torch.randn(num_columns, device="cuda", dtype=dtype)


def assert_right(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), expected, atol=4 * eps, rtol=eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_columns", "depth"), SHAPES)
def test_any_few_rows_are_multiplied_as_exactly_as_the_dtype_allows(
    num_columns: int, depth: int, dtype: torch.dtype
) -> None:
    for num_rows in (1, 2, 5, 8, 15, 16, 17, 31, kernels.MAX_ROWS, kernels.MAX_ROWS + 1):
        x, weight, bias = operands(num_rows, num_columns, depth, dtype)
        assert_right(linear(x, weight, None), x, weight, None)
        assert_right(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_a_recorded_chain_whose_kernels_overlap_gives_the_bits_of_single_launches(num_rows: int) -> None:
    """Each product reads what the one before wrote, between kernels of other kinds, many times over."""
    x = torch.randn(num_rows, 1024, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(12)]

    def chain(wait: bool) -> torch.Tensor:
        h = x
        for i, weight in enumerate(weights):
            product = linear(h, weight, None)
            if wait:
                torch.cuda.synchronize()
            h = product if i % 3 else torch.tanh(product) + h
            if wait:
                torch.cuda.synchronize()
        return h

    expected = chain(wait=True).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(wait=False)
    for _ in range(200):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


def test_a_recorded_product_follows_its_input() -> None:
    x, weight, bias = operands(3, 1024, 2048, torch.bfloat16)
    linear(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weight, bias)
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert_right(out, x, weight, bias)
