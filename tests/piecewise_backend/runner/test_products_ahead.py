"""Products that a start notes are those that the next one makes ahead, whatever lies on disk."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piecewise_backend.config import parse_options
from piecewise_backend.data_files import files_of, write_data
from piecewise_backend.runner import RunnerConfig, products_ahead
from piecewise_backend.runner.products_ahead import ProductsAhead, make_products, numbers_for

linear = pytest.importorskip("attention.kernels.linear", reason="needs Triton")

CUDA, CPU, HALF = torch.device("cuda"), torch.device("cpu"), torch.bfloat16


def ahead_of(folder: Path, device: torch.device = CUDA, model: nn.Module | None = None, **given: Any) -> ProductsAhead:
    options = parse_options({"cache_dir": str(folder), "compiler": "inductor", **given})
    return ProductsAhead(model or nn.Linear(16, 64, dtype=HALF), RunnerConfig(), options, device)


def multiply(rows: int, columns: int = 48, depth: int = 16, bias: bool = False) -> None:
    weight = torch.randn(columns, depth).bfloat16()
    linear.linear(torch.randn(rows, depth).bfloat16(), weight, weight[:, 0].contiguous() if bias else None)


def test_products_left_to_the_library_are_noted_and_read_by_the_next_start_like_this_one(tmp_path: Path) -> None:
    with ahead_of(tmp_path).noted():
        for rows in (64, 256, 64):
            multiply(rows)
        multiply(64, bias=True)
    assert linear._noted is None
    expected = {(64, 48, 16, HALF, False), (256, 48, 16, HALF, False), (64, 48, 16, HALF, True)}
    assert ahead_of(tmp_path)._read() == expected
    for other in (
        ahead_of(tmp_path, model=nn.Linear(16, 72, dtype=HALF)),
        ahead_of(tmp_path, capture_sizes=[1, 2]),
        ahead_of(tmp_path, mode="FULL"),
    ):
        assert other._read() == frozenset()


def test_a_list_is_written_again_only_where_products_are_missing_in_it(tmp_path: Path) -> None:
    for products, files in (([64], 1), ([64], 1), ([64, 128], 2), ([128], 2)):
        ahead = ahead_of(tmp_path)
        ahead.known = ahead._read()
        with ahead.noted():
            for rows in products:
                multiply(rows)
        assert len(files_of(ahead.folder, ahead.key)) == files


@pytest.mark.parametrize(
    ("device", "given"), [(CPU, {}), (CUDA, {"cache": False}), (CUDA, {"compiler": "eager"})], ids=str
)
def test_nothing_is_noted_where_a_next_start_would_not_use_it(
    device: torch.device, given: dict[str, Any], tmp_path: Path
) -> None:
    ahead = ahead_of(tmp_path, device, **given)
    ahead.begin()
    with ahead.noted():
        multiply(64)
    assert not ahead.folder.exists()


@pytest.mark.parametrize(
    "data", [{}, {"a": 1}, 3, [[1, 2]], [[1, 2, 3, "int4", False]], [["a", 2, 3, "bfloat16", False]], None], ids=str
)
def test_a_file_that_is_no_list_of_products_is_as_none(data: Any, tmp_path: Path) -> None:
    ahead = ahead_of(tmp_path)
    write_data(ahead.folder, ahead.key, data)
    assert ahead._read() == frozenset()


def test_a_folder_that_cannot_be_written_to_does_not_stop_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "products").write_text("in the way")
    with caplog.at_level(logging.INFO, logger=products_ahead.__name__), ahead_of(tmp_path).noted():
        multiply(64)
    assert "products of this start are not kept" in caplog.text


def test_operands_are_parameters_that_have_numbers_enough_and_are_left_as_they_were() -> None:
    parameters = [nn.Parameter(torch.randn(64, 16).to(dtype)) for dtype in (HALF, torch.float16)]
    parameters += [nn.Parameter(torch.randn(8, 8).bfloat16()), nn.Parameter(torch.randn(16, 200).bfloat16().t())]
    before = [p.detach().clone() for p in parameters]
    fits = {(64, 16, 16, HALF, True), (16, 64, 16, HALF, False), (4, 16, 16, torch.float16, True)}
    too_large = {(64, 64, 16, HALF, False), (4, 65, 16, HALF, False), (65, 4, 16, HALF, False), (1, 1, -1, HALF, False)}
    numbers = numbers_for(fits | too_large | {(4, 4, 4, torch.float32, False)}, parameters)
    assert list(numbers) == sorted(fits, key=lambda p: p[:3], reverse=True)
    made: list[tuple[Any, ...]] = []
    original = linear.library_product

    def note(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        made.append((*x.shape[:1], *weight.shape, x.dtype, bias is not None))
        return original(x, weight, bias, out)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(linear, "library_product", note)
        make_products(numbers, torch.empty(64 * 16 * 2, dtype=torch.uint8))
    assert made == list(numbers)
    for parameter, expected in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=0)


class Stream:
    def wait_stream(self, other: Any) -> None:
        pass


def test_the_thread_has_made_all_products_when_captures_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ahead_of(tmp_path).noted():
        multiply(40, columns=24)
    given: list[Any] = []

    def slowly(*arguments: Any) -> None:
        time.sleep(0.05)
        given.extend(arguments)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(products_ahead, "_on_stream", slowly)
    ahead = ahead_of(tmp_path)
    ahead.device = CPU
    ahead.begin()
    with ahead.noted():
        _, numbers, out = given
    assert list(numbers) == [(40, 24, 16, HALF, False)]
    assert out.numel() == 40 * 24 * HALF.itemsize


def test_without_memory_for_results_a_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any, **facts: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    with ahead_of(tmp_path).noted():
        multiply(40, columns=24)
    ahead = ahead_of(tmp_path)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch, "empty", refuse)
    with caplog.at_level(logging.INFO, logger=products_ahead.__name__):
        ahead.begin()
        with ahead.noted():
            pass
    assert "products are not made ahead: OutOfMemoryError: full" in caplog.text


def test_a_thread_that_fails_says_so_and_leaves_the_start_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=products_ahead.__name__):
        products_ahead._on_stream(object(), {}, torch.empty(0))
    assert "products are not made ahead: AttributeError" in caplog.text
