"""Joined tables for the Triton kernels, and the index that says which of their entries belongs to a row or column."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from relvit.ops.backends.axis_logits import (
    WIDTH_MULTIPLE,
    Axes,
    Distances,
    clip_distances,
    grid_axes,
    join_tables,
    make_table_index,
    once_per_raster,
)
from relvit.ops.buckets import bucket, saturation
from relvit.ops.grid import Grid
from relvit.ops.inputs import AttentionInputs
from relvit.ops.terms import AxisTables, with_width


class Lookup(NamedTuple):
    """Entries of joined tables by row and column of the key grid, and the inverse; 1 where a raster serves all samples.

    Attributes:
        reach: as that of `axis_logits.TableIndex`.
        index: (1 or B, Nq, H + W) int16, or int32 where needed: the entry of each row, then column; never decreasing.
        bounds: (1 or B, Nq, entries + 1), likewise: entry e belongs to the rows and columns bounds[e] to bounds[e + 1].
    """

    reach: Distances
    index: Tensor
    bounds: Tensor


def key_operands(inputs: AttentionInputs) -> tuple[Tensor | None, Tensor | None, Lookup | None]:
    """Join the tables of the key term, (heads, entries, head_dim), and the bias, (heads, entries), with one index."""
    heads, (key, bias), bucketing = inputs.query.shape[1], (inputs.terms.key, inputs.terms.bias), inputs.terms.bucketing
    if key is None and bias is None:
        return None, None, None
    bias = None if bias is None else with_width(bias)
    given = [tables for tables in (key, bias) if tables is not None]
    if len({clip_distances(tables) for tables in given}) > 1:
        # A row for each offset that either can distinguish.
        pairs = zip(*map(clip_distances, given), strict=True)
        distances = tuple(saturation(max(pair), bucketing) for pair in pairs)
        key, bias = (_by_offset(tables, distances, bucketing) for tables in (key, bias))
        bucketing = "clip"
    lookup = find(bias if key is None else key, bucketing, inputs)
    if bias is not None:
        # The scale is for all logits.
        bias = join_tables(bias, lookup.reach, bias.rows.dtype).expand(heads, -1, -1)[..., 0] / inputs.scale
    if key is not None:
        key = join_tables(key, lookup.reach, key.rows.dtype).expand(heads, -1, -1)
    return key, bias, lookup


def value_operands(inputs: AttentionInputs) -> tuple[Tensor | None, Lookup | None]:
    """Join the value tables, (heads, entries, value_dim)."""
    tables = inputs.terms.value
    if tables is None:
        return None, None
    lookup = find(tables, inputs.terms.bucketing, inputs)
    return join_tables(tables, lookup.reach, tables.rows.dtype).expand(inputs.query.shape[1], -1, -1), lookup


def find(tables: AxisTables, bucketing: str, inputs: AttentionInputs) -> Lookup:
    """Find the entry for each row and column of the key grid."""
    axes = grid_axes(inputs.key_grid)
    return once_per_raster(_find, inputs.grid, clip_distances(tables), bucketing, axes, like=inputs.query)


def _find(grid: Grid, distances: Distances, bucketing: str, axes: Axes, device: torch.device) -> Lookup:
    reach, index = make_table_index(grid, distances, bucketing, axes, device)
    index = index[:, 0].contiguous()
    # As many entries as `join_tables` makes.
    entries = 1 + sum(2 * distance + 1 for distance in reach)
    entries += -entries % WIDTH_MULTIPLE
    wanted = torch.arange(entries + 1, device=device).expand(*index.shape[:2], -1).contiguous()
    dtype = torch.int16 if max(entries, index.shape[-1]) < 2**15 else torch.int32
    return Lookup(reach, index.to(dtype), torch.searchsorted(index, wanted).to(dtype))


def _by_offset(tables: AxisTables | None, distances: Distances, bucketing: str) -> AxisTables | None:
    """Tables with a row of their own for each offset up to `distances`."""
    if tables is None:
        return None
    made = []
    for table, near, far in zip(tables, clip_distances(tables), distances, strict=True):
        offsets = torch.arange(-far, far + 1, device=table.device)
        made.append(table[..., bucket(offsets, near, bucketing), :])
    return AxisTables(*made)
