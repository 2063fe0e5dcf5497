"""Our matrix product for a few rows, in Triton's interpreter, against the library's."""

import pytest
import torch
import torch.nn.functional as F

from attention import ops

linear = pytest.importorskip("attention.kernels.linear", reason="needs Triton")


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    tile = linear.choose_tile(len(x), *weight.shape)
    kernel, grid, arguments, constants = linear._launch(x, weight, bias, out, tile, x.device)
    kernel[grid](*arguments, **constants)


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "depth", "bias"),
    [
        (1, 48, 64, False),
        (1, 70, 2056, True),
        (1, 2100, 1032, True),
        (1, 2100, 72, False),
        (2, 70, 72, True),
        (7, 70, 1032, False),
        (16, 2100, 72, True),
        (3, 2100, 1032, False),
        (5, 4100, 1032, True),
        (17, 70, 1032, True),
        (linear.MAX_ROWS, 2100, 2056, False),
    ],
)
def test_a_few_rows_are_multiplied_as_the_library_does(num_rows: int, num_columns: int, depth: int, bias: bool) -> None:
    x = torch.randn(num_rows, depth).half()
    weight = (torch.randn(num_columns, depth) / depth**0.5).half()
    offset = torch.randn(num_columns).half() if bias else None
    out = torch.full((num_rows, num_columns), torch.nan, dtype=torch.float16)
    multiply(x, weight, offset, out)
    expected = F.linear(x.float(), weight.float(), None if offset is None else offset.float())
    torch.testing.assert_close(out.float(), expected, atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_what_lies_beyond_the_matrix_is_never_read(num_rows: int) -> None:
    beyond = torch.full((40, 72), torch.nan).half()
    beyond[:33, :72] = torch.randn(33, 72).half()
    weight, x = beyond[:33], torch.full((num_rows + 2, 72), torch.nan).half()
    x[:num_rows] = torch.randn(num_rows, 72).half()
    out = torch.empty(num_rows, 33, dtype=torch.float16)
    multiply(x[:num_rows], weight, None, out)
    torch.testing.assert_close(out.float(), x[:num_rows].float() @ weight.float().T, atol=4e-3 * 9, rtol=2e-3)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x, w, b: (x.float(), w.float(), b.float()),
        lambda x, w, b: (x, w.T.contiguous().T, b),
        lambda x, w, b: (x[:, :63], w[:, :63].contiguous(), b),
        lambda x, w, b: (x, w, torch.randn(64).half()[::2]),
        lambda x, w, b: (x, torch.randn(32 * 64 + 1).half()[1:].view(32, 64), b),
    ],
    ids=["float32", "transposed weight", "odd depth", "strided bias", "unaligned weight"],
)
def test_operands_that_the_kernels_are_not_made_for_are_left_to_the_library(spoil) -> None:
    operands = spoil(torch.randn(2, 64).half(), torch.randn(32, 64).half(), torch.randn(32).half())
    assert not linear._fits(*operands)
    torch.testing.assert_close(linear.linear(*operands), F.linear(*operands))


def test_leading_dimensions_are_kept_and_no_rows_give_none() -> None:
    weight = torch.randn(24, 16)
    for shape in ((3, 2, 16), (0, 16), (3, 0, 16), (16,)):
        for bias in (None, torch.randn(24)):
            x = torch.randn(shape)
            torch.testing.assert_close(ops.linear(x, weight, bias), F.linear(x, weight, bias))
            torch.testing.assert_close(linear.linear(x, weight, bias), F.linear(x, weight, bias))
    nothing = torch.randn(2, 3, 0), torch.randn(24, 0), torch.randn(24)
    torch.testing.assert_close(linear.linear(*nothing), F.linear(*nothing))
    assert linear.linear(torch.randn(0, 16).half(), weight.half(), None).shape == (0, 24)


@pytest.mark.parametrize(
    ("num_columns", "depth"), [(1000, 1024), (4096, 1024), (4096, 4096), (14336, 512), (128, 9000)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_kernel_of_a_weight_is_among_those_compiled_ahead(num_columns: int, depth: int, with_bias: bool) -> None:
    weight = torch.empty(num_columns, depth, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(num_columns, dtype=torch.bfloat16, device="meta") if with_bias else None
    ahead = [
        (kernel, constants) for kernel, _, _, constants in linear.launches_ahead(weight, bias, torch.device("cpu"))
    ]
    assert ahead
    for rows in range(1, linear.MAX_ROWS + 1):
        if (tile := linear.choose_tile(rows, num_columns, depth)) is None:
            continue
        x, out = weight.new_empty(rows, depth), weight.new_empty(rows, num_columns)
        kernel, _, _, constants = linear._launch(x, weight, bias, out, tile, torch.device("cpu"))
        assert (kernel, constants) in ahead


def test_a_weight_that_the_kernels_are_not_made_for_has_none_ahead() -> None:
    for dtype, depth in ((torch.float32, 64), (torch.bfloat16, 63)):
        weight = torch.empty(32, depth, dtype=dtype, device="meta")
        assert linear.launches_ahead(weight, None, torch.device("cpu")) == []
