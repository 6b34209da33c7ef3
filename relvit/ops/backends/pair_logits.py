"""Add row and column logits for pairs of tokens, and sum over pairs back, for the backend `tiled`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.backends.axis_logits import Axes
from relvit.ops.grid import Grid, batched_coords

# For rows of fewer than this number of entries, a matrix product with ones is faster than `torch.sum`.
SHORT_ROW = 20


class Positions(NamedTuple):
    """Row and column of each token, counted from the first of `height` rows and `width` columns.

    Prefix tokens have the row `height` and the column `width`, beyond the last row and column. y and x are int64, (1 or
    B, 1, N, 1) for queries and (1 or B, 1, 1, N) for keys. y and x are None for keys whose grid has no `coords`: first
    come `prefix` tokens, then all patches, row by row.
    """

    height: int
    width: int
    prefix: int
    y: Tensor | None = None
    x: Tensor | None = None


def token_positions(grid: Grid, axes: Axes, device: torch.device, axis: int) -> Positions:
    """Find the positions of all tokens; those beyond the outermost row or column of `axes` count as in it."""
    y, x = (
        F.pad((of_axis - first).clamp(0, size - 1), (grid.prefix, 0), value=size)[:, None].unsqueeze(axis)
        for of_axis, (first, size) in zip(batched_coords(grid, device).unbind(-1), axes, strict=True)
    )
    return Positions(axes[0].size, axes[1].size, grid.prefix, y, x)


def to_pairs(values: Tensor, keys: Positions, out: Tensor) -> None:
    """Write, for each key, the sum of its row's and its column's number.

    `values` are the numbers of a tile, (samples, heads, queries, H + W), for a key grid of H x W patches. `out` is
    (samples, heads, queries, Nk).
    """
    rows, cols = values.split((keys.height, keys.width), dim=-1)
    if keys.y is None:
        out[..., : keys.prefix] = 0
        torch.add(rows[..., None], cols[..., None, :], out=_raster(out, keys))
        return
    lead = rows.shape[:-1]
    # Prefix keys have the row H and the column W, so put a zero there, after the last row and the last column.
    torch.gather(F.pad(rows, (0, 1)), -1, keys.y.expand(*lead, -1), out=out)
    out.add_(F.pad(cols, (0, 1)).gather(-1, keys.x.expand(*lead, -1)))


def from_pairs(pairs: Tensor, keys: Positions, out: Tensor) -> None:
    """Write the transpose of `to_pairs`: sums of `pairs` over the keys of each row and over the keys of each column."""
    rows, cols = out.split((keys.height, keys.width), dim=-1)
    if keys.y is None:
        raster = _raster(pairs, keys)
        if keys.width < SHORT_ROW and raster.is_contiguous():
            rows.copy_(torch.mv(raster.view(-1, keys.width), raster.new_ones(keys.width)).view(rows.shape))
        else:
            torch.sum(raster, -1, out=rows)
        torch.sum(raster, -2, out=cols)
        return
    lead = pairs.shape[:-1]
    for index, sums in ((keys.y, rows), (keys.x, cols)):
        padded = pairs.new_zeros(*lead, sums.shape[-1] + 1)
        sums.copy_(padded.scatter_add_(-1, index.expand(*lead, -1), pairs)[..., :-1])


def _raster(pairs: Tensor, keys: Positions) -> Tensor:
    """View (..., Nk) without the prefix tokens as (..., H, W)."""
    return pairs[..., keys.prefix :].unflatten(-1, (keys.height, keys.width))


def to_queries(key_logits: Tensor, queries: Positions) -> Tensor:
    """Add each key's two logits for the query's row and column: (samples, heads, queries, Nk).

    `key_logits` are (samples, heads, Nk, rows + columns), for the rows and columns of `queries`.
    """
    picked = []
    parts = key_logits.split((queries.height, queries.width), dim=-1)
    for part, index in zip(parts, (queries.y, queries.x), strict=True):
        part = F.pad(part, (0, 1)).mT.contiguous()
        picked.append(part.gather(-2, index.expand(*part.shape[:2], -1, part.shape[-1])))
    return picked[0].add_(picked[1])


def from_queries(pairs: Tensor, queries: Positions, key_logits: Tensor) -> None:
    """Add the transpose of `to_queries` to `key_logits`."""
    batch, heads, _, keys = pairs.shape
    parts = key_logits.split((queries.height, queries.width), dim=-1)
    for part, index in zip(parts, (queries.y, queries.x), strict=True):
        padded = pairs.new_zeros(batch, heads, part.shape[-1] + 1, keys)
        part += padded.scatter_add_(-2, index.expand(batch, heads, -1, keys), pairs)[:, :, :-1].mT
