"""Places of tokens in a flat table by offset, and sums of offsets by table entry, for a joint bias in Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.buckets import bucket
from relvit.ops.grid import Grid, once_per_raster

# Kernels read places (see `Layout`) in whole blocks of up to this many tokens, so the tensors of places are filled up
# beyond the last token.
LARGEST_BLOCK = 128


class Layout(NamedTuple):
    """Places of tokens in a flat table (heads, `before` + offsets + `behind`), which has zeros at both ends."""

    # Both tensors are int32 and begin with Nq and Nk places; further places fill them up to a multiple of
    # `LARGEST_BLOCK`. The pair of query i and key j reads the entry with index keys[j] - queries[i].
    queries: Tensor
    keys: Tensor
    before: int
    behind: int


@once_per_raster
def layout(grid: Grid, key_grid: Grid, device: torch.device) -> Layout:
    """Lay out a table with a row for each vertical offset, and a column for each horizontal offset of two grids.

    For H x W patches of queries and H' x W' patches of keys the table has H + H' - 1 rows and W + W' - 1 columns.

    The kernels have no case for prefix tokens, so pairs with a prefix token read zeros: pairs with a prefix key read
    the zeros before the table, one for each place of a query, and pairs with a prefix query read the zeros after the
    table.
    """
    columns = grid.width + key_grid.width - 1
    offsets = (grid.height + key_grid.height - 1) * columns
    # `span` and `key_span` are the numbers of distinct places of queries and of keys.
    span, key_span = ((tokens.height - 1) * columns + tokens.width for tokens in (grid, key_grid))
    before, behind = (span, span + key_span) if grid.prefix or key_grid.prefix else (0, 0)
    first_query, first_key = 1 - span - before, 0
    places = []
    for tokens, first, of_prefix in ((grid, first_query, -2 * before - offsets), (key_grid, first_key, -before)):
        rows, cols = (torch.arange(size, dtype=torch.int32, device=device) for size in tokens[:2])
        patches = (rows[:, None] * columns + cols + first).flatten()
        beyond = -(tokens.prefix + len(patches)) % LARGEST_BLOCK
        places.append(torch.cat((patches.new_full((tokens.prefix,), of_prefix), patches, patches[-1:].expand(beyond))))
    return Layout(*places, before, behind)


def by_entry(sums: Tensor, table: Tensor, grid: Grid, key_grid: Grid, tile: tuple[int, int], bucketing: str) -> Tensor:
    """Sum up the `sums` of `joint_backward_table` by entry of a table (1 or heads, 2k + 1, 2k + 1)."""
    of_rows, of_cols = (
        _entries_of_sums(grid, key_grid, axis, tile[axis], table.shape[axis - 2] // 2, bucketing, table.device)
        for axis in (0, 1)
    )
    by_row = sums.sum(0).permute(0, 1, 3, 2, 4).flatten(3, 4).flatten(1, 2)
    # Matrix products add up in a fixed order; `index_add` does not, so multiply by one-hot matrices.
    entries = of_rows.mT @ (by_row @ of_cols)
    return entries.sum_to_size(table.shape).to(table.dtype)


@once_per_raster
def _entries_of_sums(
    grid: Grid, key_grid: Grid, axis: int, size: int, distance: int, bucketing: str, device: torch.device
) -> Tensor:
    """Mark the table's entry along an axis for each row, or column, offset of `sums`: (offsets, 2k + 1) float32."""
    blocks, key_blocks = (-(-tokens[axis] // size) for tokens in (grid, key_grid))
    of_blocks = size * torch.arange(1 - blocks, key_blocks, device=device)
    offsets = (of_blocks[:, None] + torch.arange(1 - size, size + 1, device=device)).flatten()
    entries = F.one_hot(bucket(offsets, distance, bucketing), 2 * distance + 1)
    return entries.to(torch.float32)
