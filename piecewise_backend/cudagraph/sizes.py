"""Which padded token counts get graphs."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

DEFAULT_LARGEST = 512


def default_capture_sizes(largest: int = DEFAULT_LARGEST) -> tuple[int, ...]:
    """1, 2, 4, then steps of 8 to 256, then of 16; `largest` itself is always a size.

    >>> default_capture_sizes(42)
    (1, 2, 4, 8, 16, 24, 32, 40, 42)
    """
    if largest < 1:
        raise ValueError(f"the largest capture size must be at least 1, got {largest}")
    steps = [1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16)]
    return (*(size for size in steps if size < largest), largest)


def clean_capture_sizes(sizes: Iterable[int], *, limit: int | None = None) -> tuple[int, ...]:
    """Sorted, without repeats, clamped to `limit`: a size above it becomes `limit` itself.

    ValueError for anything that is not a positive integer.
    """
    given = list(sizes)
    for size in given:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"capture sizes must be positive integers, got {size!r} in {given}")
    return tuple(sorted({min(size, limit) if limit is not None else size for size in given}))


def uniform_capture_sizes(
    sizes: Sequence[int], *, query_len: int, max_num_reqs: int, max_num_tokens: int
) -> tuple[int, ...]:
    """Sizes of batches in which every request has `query_len` tokens: multiples of it, none beyond the limits.

    Each size is rounded up to whole requests, so none is cut short, and the largest batch that can occur is always a
    size if any given size reaches it. Empty where not one request fits.
    """
    largest = min(max_num_reqs, max_num_tokens // query_len) * query_len
    rounded = {min(-(-size // query_len) * query_len, largest) for size in sizes}
    return tuple(sorted(rounded - {0}))


def smallest_fitting(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest of the sorted `sizes` that holds `wanted`; None when all are too small."""
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
