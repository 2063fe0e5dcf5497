"""Padded token counts."""

import pytest

from piecewise_backend.cudagraph.sizes import (
    clean_capture_sizes,
    default_capture_sizes,
    smallest_fitting,
    uniform_capture_sizes,
)


def test_default_sizes_are_dense_where_batches_are_small() -> None:
    sizes = default_capture_sizes()
    assert len(sizes) == 51
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-3:] == (480, 496, 512)


@pytest.mark.parametrize("largest", [1, 2, 3, 42, 255, 256, 257, 300, 511])
def test_the_largest_size_is_always_a_size_itself(largest: int) -> None:
    """R28: a maximum of 42 (6 requests of 7 tokens) is not rounded away."""
    sizes = default_capture_sizes(largest)
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))


def test_given_sizes_are_sorted_and_clamped() -> None:
    assert clean_capture_sizes([8, 2, 8, 900], limit=42) == (2, 8, 42)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "8", True])
def test_a_size_that_is_no_positive_integer_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="positive integers"):
        clean_capture_sizes([4, wrong])


def test_decode_sizes_hold_whole_requests() -> None:
    """R29: query length 3, each size divisible by 3."""
    assert uniform_capture_sizes((1, 2, 4, 8, 16, 24), query_len=3, max_num_reqs=8, max_num_tokens=24) == (
        3,
        6,
        9,
        18,
        24,
    )


@pytest.mark.parametrize(("max_num_tokens", "expected"), [(64, (3, 33, 63)), (2, ())])
def test_no_decode_size_is_beyond_what_one_step_may_hold(max_num_tokens: int, expected: tuple[int, ...]) -> None:
    """R26: every size is reached by some batch; one of 66 tokens could not be, with steps of at most 64."""
    sizes = uniform_capture_sizes((1, 32, 64), query_len=3, max_num_reqs=99, max_num_tokens=max_num_tokens)
    assert sizes == expected


def test_the_smallest_fitting_size_is_found() -> None:
    assert [smallest_fitting((1, 4, 8), n) for n in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]
