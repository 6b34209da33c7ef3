"""Places of tokens in a flat table by offset, and sums by offset to sums by table entry, for a joint bias in Triton."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.buckets import bucket
from relvit.ops.grid import Grid, once_per_raster

# Blocks of tokens are no larger than this, and places beyond the last token are read.
LARGEST_BLOCK = 128
# Prefix tokens are so far away that all their pairs have negative indices, in 32 bits.
FAR = 1 << 29


@once_per_raster
def places(grid: Grid, key_grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number the tokens of two rasters such that the difference, key minus query, is the pair's entry in a flat table.

    The table has a row for each vertical offset, H + H' - 1, and a column for each horizontal one, behind an entry for
    pairs with a prefix token, whose differences are negative.

    Returns:
        Places of queries and of keys, int32, each up to a multiple of `LARGEST_BLOCK` tokens.
    """
    columns = grid.width + key_grid.width - 1
    least = (grid.height - 1) * columns + grid.width
    found = []
    for tokens, first, far in ((grid, -least, FAR), (key_grid, 0, -FAR)):
        rows, cols = (torch.arange(size, dtype=torch.int32, device=device) for size in tokens[:2])
        patches = (rows[:, None] * columns + cols + first).flatten()
        beyond = -(tokens.prefix + len(patches)) % LARGEST_BLOCK
        found.append(torch.cat((patches.new_full((tokens.prefix,), far), patches, patches[-1:].expand(beyond))))
    return found[0], found[1]


def by_entry(sums: Tensor, table: Tensor, grid: Grid, key_grid: Grid, tile: tuple[int, int], bucketing: str) -> Tensor:
    """Sum up the `sums` of `joint_backward_table` by entry of a table (1 or heads, 2k + 1, 2k + 1)."""
    of_rows, of_cols = (
        _entries_of_sums(grid, key_grid, axis, tile[axis], table.shape[axis + 1] // 2, bucketing, table.device)
        for axis in (0, 1)
    )
    by_row = sums.sum(0).permute(0, 1, 3, 2, 4).flatten(3, 4).flatten(1, 2)
    # As products the sums have a fixed order, which those of `index_add` have not.
    entries = of_rows.mT @ (by_row @ of_cols)
    return entries.sum_to_size(table.shape).to(table.dtype)


@once_per_raster
def _entries_of_sums(
    grid: Grid, key_grid: Grid, axis: int, size: int, distance: int, bucketing: str, device: torch.device
) -> Tensor:
    """Mark the table's entry along an axis for each row, or column, of a program's sums: (sums, 2k + 1) float32."""
    blocks, key_blocks = (-(-tokens[axis] // size) for tokens in (grid, key_grid))
    of_blocks = size * torch.arange(1 - blocks, key_blocks, device=device)
    offsets = (of_blocks[:, None] + torch.arange(1 - size, size + 1, device=device)).flatten()
    entries = F.one_hot(bucket(offsets, distance, bucketing), 2 * distance + 1)
    return entries.to(torch.float32)
