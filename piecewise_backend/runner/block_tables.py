"""Block tables: logical blocks of each request to physical ones, and the slot of each new token."""

from __future__ import annotations

import numpy as np

from piecewise_backend.runner.batch import InputBatch
from piecewise_backend.runner.buffers import InputBuffers

PAD_SLOT = -1


class BlockTables:
    """Writes block tables and slot mappings of a batch into the persistent buffers."""

    def __init__(self, buffers: InputBuffers, block_size: int) -> None:
        self.buffers = buffers
        self.block_size = block_size

    def write(self, batch: InputBatch, num_tokens: int, num_reqs: int) -> None:
        """Block tables [num_reqs, max_num_blocks] and slot mapping [num_tokens] of a padded batch, on the host side.

        Padded requests have a table of zeros, padded tokens slot -1.
        """
        tables, slots = self.buffers.block_table.np, self.buffers.slot_mapping.np
        for index, request in enumerate(batch.requests):
            tables[index, : len(request.block_ids)] = request.block_ids
        tables[batch.num_reqs : num_reqs] = 0
        positions = batch.positions
        blocks = tables[batch.token_request, positions // self.block_size].astype(np.int64)
        slots[: batch.num_tokens] = blocks * self.block_size + positions % self.block_size
        slots[batch.num_tokens : num_tokens] = PAD_SLOT

    def get_dummy_block_tables(self, num_tokens: int, num_reqs: int) -> None:
        """As `write`, for a dummy batch: every table points at block 0, and no token is written anywhere."""
        self.buffers.block_table.np[:num_reqs] = 0
        self.buffers.slot_mapping.np[:num_tokens] = PAD_SLOT
