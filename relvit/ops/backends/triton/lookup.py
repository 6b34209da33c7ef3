"""Join the tables for rows and for columns into one for the Triton kernels, with the index of its entries."""

from __future__ import annotations

import torch
from torch import Tensor

from relvit.ops.backends.axis_logits import (
    WIDTH_MULTIPLE,
    Axes,
    Distances,
    clip_distances,
    grid_axes,
    join_tables,
    table_index,
)
from relvit.ops.buckets import bucket, saturation
from relvit.ops.grid import Grid, once_per_raster
from relvit.ops.inputs import AttentionInputs
from relvit.ops.terms import AxisTables, with_width


def key_operands(inputs: AttentionInputs) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Join the tables of the key term, (heads, entries, head_dim), and the bias, (heads, entries).

    Returns the joined table, the joined bias, and the index and the bounds that both share, see `_find`. A table that
    is absent is None; if both are absent, all four results are None.
    """
    heads, (key, bias), bucketing = inputs.query.shape[1], (inputs.terms.key, inputs.terms.bias), inputs.terms.bucketing
    if key is None and bias is None:
        return None, None, None, None
    bias = None if bias is None else with_width(bias)
    given = [tables for tables in (key, bias) if tables is not None]
    if len({clip_distances(tables) for tables in given}) > 1:
        # If the key term and the bias have different clip distances, extend the tables of both to all offsets that one
        # of them can distinguish, so that one index serves both.
        pairs = zip(*map(clip_distances, given), strict=True)
        distances = tuple(saturation(max(pair), bucketing) for pair in pairs)
        key, bias = (_by_offset(tables, distances, bucketing) for tables in given)
        given, bucketing = [key, bias], "clip"
    grid_and_axes = (inputs.grid, clip_distances(given[0]), bucketing, grid_axes(inputs.key_grid))
    reach, index, bounds = _find(*grid_and_axes, inputs.query.device)
    if bias is not None:
        # The kernels multiply all logits, the bias included, by the scale, so divide the bias by the scale, in float32:
        # in half precision the quotient would be rounded.
        bias = join_tables(bias, reach, torch.float32).expand(heads, -1, -1)[..., 0] / inputs.scale
    if key is not None:
        key = join_tables(key, reach, key.rows.dtype).expand(heads, -1, -1)
    return key, bias, index, bounds


def value_operands(inputs: AttentionInputs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Join the value tables, (heads, entries, value_dim), with index and bounds."""
    tables, query = inputs.terms.value, inputs.query
    if tables is None:
        return None, None, None
    distances, axes = clip_distances(tables), grid_axes(inputs.key_grid)
    reach, index, bounds = _find(inputs.grid, distances, inputs.terms.bucketing, axes, query.device)
    return join_tables(tables, reach, tables.rows.dtype).expand(query.shape[1], -1, -1), index, bounds


@once_per_raster
def _find(
    grid: Grid, distances: Distances, bucketing: str, axes: Axes, device: torch.device
) -> tuple[Distances, Tensor, Tensor]:
    """Find the table entry of each row and column of keys, and the rows and columns of each entry, as int16 or int32.

    Returns the clip distances that `table_index` returns, an index, and bounds. The index, (1 or B, Nq, H + W), has the
    table entry that each query uses for each row of the key grid, then for each column. Entries never decrease along
    the last axis, so each query uses an entry for a range of the axis. The bounds, (1 or B, Nq, entries + 1), are the
    ends of these ranges: query i uses entry e at the positions bounds[i, e] to bounds[i, e + 1] - 1.
    """
    reach, index = table_index(grid, distances, bucketing, axes, device)
    index = index[:, 0].contiguous()
    # Compute the number of entries by the same formula as `join_tables`.
    entries = 1 + sum(2 * distance + 1 for distance in reach)
    entries += -entries % WIDTH_MULTIPLE
    wanted = torch.arange(entries + 1, device=device).expand(*index.shape[:2], -1).contiguous()
    dtype = torch.int16 if max(entries, index.shape[-1]) < 2**15 else torch.int32
    return reach, index.to(dtype), torch.searchsorted(index, wanted).to(dtype)


def _by_offset(tables: AxisTables, distances: Distances, bucketing: str) -> AxisTables:
    """Make tables with one vector for each offset up to `distances`."""
    made = []
    for table, near, far in zip(tables, clip_distances(tables), distances, strict=True):
        offsets = torch.arange(-far, far + 1, device=table.device)
        made.append(table[..., bucket(offsets, near, bucketing), :])
    return AxisTables(*made)
