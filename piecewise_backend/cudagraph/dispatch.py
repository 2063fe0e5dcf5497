"""From a batch to the captured descriptor that serves it: one look-up."""

from __future__ import annotations

from collections.abc import Iterable

from piecewise_backend.cudagraph.modes import BatchDescriptor


class Dispatcher:
    """Smallest fitting descriptor by number of tokens, for uniform decode and for mixed batches.

    A table over every number of tokens makes a look-up O(1). A uniform decode batch that no decode descriptor fits is
    served as a mixed one.
    """

    def __init__(self, descriptors: Iterable[BatchDescriptor]) -> None:
        descriptors = sorted(descriptors, key=lambda d: d.num_tokens)
        self._mixed = _table([d for d in descriptors if d.uniform_query_len is None])
        self._decode: dict[int, list[BatchDescriptor]] = {}
        for length in {d.uniform_query_len for d in descriptors if d.uniform_query_len is not None}:
            self._decode[length] = _table([d for d in descriptors if d.uniform_query_len == length])

    def dispatch(self, num_tokens: int, num_reqs: int, uniform_query_len: int | None = None) -> BatchDescriptor | None:
        """The descriptor for a batch; None when every captured size is too small.

        `uniform_query_len`: set only for a batch whose requests are all past their prefill and have this query
        length, whatever the shape of other batches.
        """
        if uniform_query_len is not None:
            table = self._decode.get(uniform_query_len, [])
            if num_tokens < len(table):
                return table[num_tokens]
        if num_tokens >= len(self._mixed):
            return None
        found = self._mixed[num_tokens]
        return found if found.num_reqs is None or num_reqs <= found.num_reqs else None


def _table(descriptors: list[BatchDescriptor]) -> list[BatchDescriptor]:
    """Entry n: the first of the sorted `descriptors` that holds n tokens."""
    table: list[BatchDescriptor] = []
    for descriptor in descriptors:
        table.extend([descriptor] * (descriptor.num_tokens + 1 - len(table)))
    return table
