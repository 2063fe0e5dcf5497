"""How much one program of the attention kernel takes on: a table, since a recording must not autotune."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_GROUP = 128
"""Query heads a KV head may have: they share a tile's rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """`block_m` rows (query tokens x query heads of one KV head) a program, by `block_n` keys a step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """Programs that are worth having per multiprocessor before KV is no longer split."""
    split_keys: int
    """The fewest keys that are worth a split of their own."""

    def shared_memory(self, head_size_padded: int, itemsize: int) -> int:
        """Bytes for the query tile, the key and value tiles in flight, and a little that the compiler adds."""
        return (self.block_m + 2 * self.num_stages * self.block_n) * head_size_padded * itemsize + 2048


# (head size at most, rows at most) -> tile; the first that fits. For Hopper. 16 rows are a decode step, bound by
# memory: 32 KiB of keys and values a stage, two stages in flight, room for three programs on a multiprocessor. A split
# gets about a stage at the least: its loads are then under way all at once, and fewer keys would take as long.
# 128 rows by 8 warps feed the tensor cores; two stages leave room for a second program (0.22 ms for 8 x 1024 tokens of
# 16 heads on an H200; with three it takes 0.31).
_ROWS_ANY = 1 << 30
_HALF: dict[tuple[int, int], Tile] = {
    (64, 16): Tile(block_m=16, block_n=128, num_warps=4, num_stages=3, programs_per_sm=2, split_keys=128),
    (64, 64): Tile(block_m=64, block_n=64, num_warps=4, num_stages=3, programs_per_sm=2, split_keys=128),
    (64, _ROWS_ANY): Tile(block_m=128, block_n=128, num_warps=8, num_stages=3, programs_per_sm=1, split_keys=128),
    (128, 16): Tile(block_m=16, block_n=64, num_warps=4, num_stages=3, programs_per_sm=2, split_keys=64),
    (128, 64): Tile(block_m=64, block_n=64, num_warps=4, num_stages=3, programs_per_sm=1, split_keys=128),
    (128, _ROWS_ANY): Tile(block_m=128, block_n=64, num_warps=8, num_stages=2, programs_per_sm=1, split_keys=128),
    (256, 16): Tile(block_m=16, block_n=32, num_warps=4, num_stages=3, programs_per_sm=2, split_keys=64),
    (256, 64): Tile(block_m=64, block_n=32, num_warps=4, num_stages=3, programs_per_sm=1, split_keys=128),
    (256, _ROWS_ANY): Tile(block_m=128, block_n=32, num_warps=8, num_stages=3, programs_per_sm=1, split_keys=128),
}
# No tensor cores in exact fp32: small tiles keep the operands in registers.
_SINGLE: dict[tuple[int, int], Tile] = {
    (128, 16): Tile(block_m=16, block_n=32, num_warps=4, num_stages=2, programs_per_sm=2, split_keys=64),
    (128, _ROWS_ANY): Tile(block_m=32, block_n=32, num_warps=4, num_stages=2, programs_per_sm=2, split_keys=128),
    (256, 16): Tile(block_m=16, block_n=16, num_warps=4, num_stages=2, programs_per_sm=2, split_keys=64),
    (256, _ROWS_ANY): Tile(block_m=32, block_n=16, num_warps=4, num_stages=2, programs_per_sm=2, split_keys=128),
}


def choose_tile(*, rows: int, group: int, head_size: int, itemsize: int, shared_memory: int) -> Tile:
    """The tile for at most `rows` rows a request (`group` of them a token), within `shared_memory` bytes."""
    table = _SINGLE if itemsize == 4 else _HALF
    tile = next(tile for (size, most), tile in table.items() if head_size <= size and rows <= most)
    # A token's whole group must fit into one tile.
    tile = replace(tile, block_m=max(tile.block_m, next_power_of_2(group)))
    padded = padded_head_size(head_size)
    while tile.shared_memory(padded, itemsize) > shared_memory and tile.num_stages > 1:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    while tile.shared_memory(padded, itemsize) > shared_memory and tile.block_n > 16:
        tile = replace(tile, block_n=tile.block_n // 2)
    return tile


def all_tiles(*, group: int, head_size: int, itemsize: int, shared_memory: int) -> tuple[Tile, ...]:
    """Every tile that `choose_tile` can give for this shape."""
    return tuple(
        choose_tile(rows=rows, group=group, head_size=head_size, itemsize=itemsize, shared_memory=shared_memory)
        for rows in (16, 64, _ROWS_ANY)
    )


def padded_head_size(head_size: int) -> int:
    """The head dimension as the kernel sees it: a power of two that a matrix product takes."""
    return max(16, next_power_of_2(head_size))


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below `n` >= 1."""
    return 1 << (n - 1).bit_length()
