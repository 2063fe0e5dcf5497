"""The physical blocks of the paged cache, and who may have them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Hands out block numbers 0 to `num_blocks` - 1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def extend(self, block_ids: list[int], num_tokens: int) -> bool:
        """Grow `block_ids` to hold `num_tokens`; False, and nothing changed, when too few blocks are free."""
        missing = self.blocks_for(num_tokens) - len(block_ids)
        if missing > len(self._free):
            return False
        block_ids.extend(self._free.popleft() for _ in range(missing))
        return True

    def release(self, block_ids: Iterable[int]) -> None:
        """Take blocks back."""
        self._free.extend(block_ids)
