"""Block tables: logical blocks of each request to physical ones, and the slot of each new token."""

from __future__ import annotations

import numpy as np

from piecewise_backend.runner.batch import InputBatch
from piecewise_backend.runner.buffers import InputBuffers

PAD_SLOT = -1


class BlockTables:
    """Writes block tables and slot mappings of a batch into the persistent buffers."""

    def __init__(self, buffers: InputBuffers, block_size: int, num_blocks: int) -> None:
        self.buffers = buffers
        self.block_size = block_size
        self.num_blocks = num_blocks

    def write(self, batch: InputBatch, num_tokens: int, num_reqs: int) -> None:
        """Block tables [num_reqs, max_num_blocks] and slot mapping [num_tokens] of a padded batch, on the host side.

        Padded requests have a table of zeros, padded tokens slot -1. ValueError for a block that the cache does not
        have.
        """
        tables, slots = self.buffers.block_table.np, self.buffers.slot_mapping.np
        longest = 0
        for index, request in enumerate(batch.requests):
            count = len(request.block_ids)
            tables[index, :count] = request.block_ids
            longest = max(longest, count)
        given = tables[: batch.num_reqs, :longest].view(np.uint32)  # a negative number is a large one
        if given.max() >= self.num_blocks:
            tables[: batch.num_reqs] = 0
            raise ValueError(self._no_such_block(batch))
        tables[batch.num_reqs : num_reqs] = 0
        blocks, offsets = np.divmod(batch.positions, self.block_size)
        starts = np.multiply(tables[batch.token_request, blocks], self.block_size, dtype=np.int64)
        np.add(starts, offsets, out=slots[: batch.num_tokens])
        slots[batch.num_tokens : num_tokens] = PAD_SLOT

    def _no_such_block(self, batch: InputBatch) -> str:
        for request in batch.requests:
            for block in request.block_ids:
                if not 0 <= block < self.num_blocks:
                    return (
                        f"request {request.request_id!r} names block {block}; this runner's cache has blocks 0 to "
                        f"{self.num_blocks - 1}"
                    )
        raise AssertionError("a table that no request of the batch wrote")

    def get_dummy_block_tables(self, num_tokens: int, num_reqs: int) -> None:
        """As `write`, for a dummy batch: every table points at block 0, and no token is written anywhere."""
        self.buffers.block_table.np[:num_reqs] = 0
        self.buffers.slot_mapping.np[:num_tokens] = PAD_SLOT
