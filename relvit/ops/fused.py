"""Exact relative attention as one stock fused attention over longer vectors.

With rows and columns apart, q_i . a^K_ij is one of H row logits plus one of W column logits of the query i. So append
those H + W logits to the query and one-hot indicators of row and column to the key: the dot product of the longer
vectors is content plus relative logit. A bias goes into the same channels, divided by the scale. The query term is the
same with the roles exchanged. Append the indicators to the value: the extra output channels are the attention's row and
column marginals, and these times the value tables are the value-side term. Nothing of N x N is formed here;
`scaled_dot_product_attention` computes the rest and its gradients in O(N (H + W)) extra memory. The longer vectors are
not kept for backward, but lengthened again.

Prior art for the parts: SAM 3's `concat_rel_pos` (key side), FlashBias (low-rank biases, arXiv 2505.12044), FlashIPA
(value-side concatenation).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.buckets import bucket, saturation
from relvit.ops.grid import Grid, key_mask
from relvit.ops.rebuilt import Rebuilt
from relvit.ops.terms import AxisTables, RelativeTerms

# Stock kernels want head widths that are multiples of 8, and are faster for it on the CPU as well.
WIDTH_MULTIPLE = 8


class Places(NamedTuple):
    """The rows and the columns that indicators tell apart: (H,) and (W,) int64, consecutive."""

    rows: Tensor
    cols: Tensor


def relative_logits(
    query: Tensor, terms: RelativeTerms, grid: Grid, key_grid: Grid | None = None
) -> tuple[Tensor, Tensor]:
    """Row and column logits of every query; see `relvit.ops.relative_logits`."""
    key_grid = grid if key_grid is None else key_grid
    logits = _axis_logits(query, terms.key, terms.bucketing, grid, _all_places(key_grid, query.device))
    return logits[..., : key_grid.height], logits[..., key_grid.height :]


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: RelativeTerms,
    grid: Grid,
    key_grid: Grid | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention with relative terms through longer vectors; see `relvit.ops.relative_attention`."""
    key_grid = grid if key_grid is None else key_grid
    # The default scale would count the appended channels.
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    places = _all_places(key_grid, key.device)
    lengthen = partial(_lengthen, terms=terms, grid=grid, key_grid=key_grid, places=places, scale=scale)
    valid = key_mask(key_grid)

    with Rebuilt() as rebuilt:
        longer = lengthen(query, key, value, rebuilt=rebuilt)
        inputs = [query.detach(), key.detach(), value.detach()]
        tables = [table for term in terms[:4] if term is not None for table in term]
        rebuilt.all_of(longer, partial(lengthen, *inputs, rebuilt=None), [*inputs, *tables])
        out = F.scaled_dot_product_attention(
            *longer, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
        content = value.shape[-1]
        result = out[..., :content]
        if terms.value is not None:
            marginals = out[..., content : content + places.rows.shape[0] + places.cols.shape[0]]
            result = result + _axis_values(marginals, terms.value, terms.bucketing, grid, places, rebuilt)
    if valid is not None:
        # A sample without any valid key has attended to its padding: it gets zeros, forward and backward.
        result = torch.where(valid.any(dim=1)[:, None, None, None], result, 0.0)
    return result


def _lengthen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    terms: RelativeTerms,
    grid: Grid,
    key_grid: Grid,
    places: Places,
    scale: float,
    rebuilt: Rebuilt | None,
) -> list[Tensor]:
    """Queries, keys and values with all that is appended to them, of one width."""
    indicators = _indicators(key_grid, places, key.dtype)
    valid = key_mask(key_grid)
    long_query, long_key, long_value = [query], [key], [value]
    if terms.key is not None or terms.bias is not None:
        long_query.append(_query_channels(query, terms, grid, places, scale, rebuilt))
        long_key.append(indicators)
    if terms.query is not None:
        query_places = _query_places(terms, grid, key_grid, query.device)
        # Seen from the key, the offset to the query is the other way round.
        mirrored = AxisTables(terms.query.rows.flip(-2), terms.query.cols.flip(-2))
        long_query.append(_indicators(grid, query_places, query.dtype))
        long_key.append(_axis_logits(key, mirrored, terms.bucketing, key_grid, query_places, rebuilt))
    if valid is not None:
        long_query.append(query.new_ones(()).expand(*query.shape[:-1], 1))
        long_key.append(torch.where(valid, 0.0, _forbidden(key.dtype)).to(key.dtype)[:, None, :, None])
    if terms.value is not None:
        long_value.append(indicators)
    # All three get one width: where value and query differ, the CPU kernel falls back to keeping N x N.
    width = max(_width(long_query), _width(long_value))
    width += -width % WIDTH_MULTIPLE
    return [_join(parts, width) for parts in (long_query, long_key, long_value)]


def _query_channels(
    query: Tensor, terms: RelativeTerms, grid: Grid, places: Places, scale: float, rebuilt: Rebuilt | None
) -> Tensor:
    """What the query adds to the logit of a key in each row, then in each column: (B, heads, Nq, H + W)."""
    channels = None
    if terms.key is not None:
        channels = _axis_logits(query, terms.key, terms.bucketing, grid, places, rebuilt)
    if terms.bias is not None:
        # A scalar table is one of width 1, met by a query of ones; samples on one grid share the result.
        tables = AxisTables(terms.bias.rows[..., None] / scale, terms.bias.cols[..., None] / scale)
        samples = grid.coords.shape[0] if grid.coords is not None and grid.coords.dim() == 3 else 1
        ones = query.new_ones(samples, query.shape[1], query.shape[2], 1)
        bias = _axis_logits(ones, tables, terms.bucketing, grid, places, rebuilt)
        channels = bias.expand(query.shape[0], -1, -1, -1) if channels is None else channels + bias
    return channels


def _axis_logits(
    query: Tensor,
    tables: AxisTables,
    bucketing: str,
    grid: Grid,
    places: Places,
    rebuilt: Rebuilt | None = None,
) -> Tensor:
    """query_i . rows[r - y_i] for all places r, then the same for columns: (B, heads, N, H + W).

    One product with all table rows, then a gather, is faster than a product per row of the grid: the tables are short.
    """
    table, index = _joint_table(tables, bucketing, grid, places, query)
    # Head by head: that neither makes nor keeps a copy of queries which lie in memory as the projection has left them.
    by_head = query.permute(1, 0, 2, 3).flatten(1, 2)
    per_offset = torch.bmm(by_head, table.expand(query.shape[1], -1, -1).transpose(-2, -1))
    per_offset = per_offset.unflatten(1, (query.shape[0], query.shape[2])).transpose(0, 1)
    if rebuilt is not None:
        rebuilt.shape_of(per_offset)
    return per_offset.gather(-1, index.expand(*per_offset.shape[:-1], -1))


def _axis_values(
    marginals: Tensor, tables: AxisTables, bucketing: str, grid: Grid, places: Places, rebuilt: Rebuilt
) -> Tensor:
    """Sum over rows and columns of marginal times table row, the transpose of `_axis_logits`: (B, heads, Nq, dim)."""
    table, index = _joint_table(tables, bucketing, grid, places, marginals)
    if table.dim() == 2:
        # Tokens before heads: so the attention writes its output, and so the projection wants it.
        marginals, index = marginals.transpose(1, 2), index.transpose(1, 2)
    collect = partial(_collect, index=index.expand_as(marginals), entries=table.shape[-2])
    per_offset = collect(marginals)
    kept = marginals.detach()
    rebuilt.all_of([per_offset], partial(_single, collect, kept), [kept])
    values = per_offset @ table
    return values.transpose(1, 2) if table.dim() == 2 else values


def _collect(marginals: Tensor, index: Tensor, entries: int) -> Tensor:
    """Sum the marginals that use the same table row: (..., entries)."""
    return marginals.new_zeros(*marginals.shape[:-1], entries).scatter_add(-1, index, marginals)


def _single(make: Callable[[Tensor], Tensor], argument: Tensor) -> list[Tensor]:
    return [make(argument)]


def _joint_table(tables: AxisTables, bucketing: str, grid: Grid, places: Places, like: Tensor) -> tuple[Tensor, Tensor]:
    """A zero row and both tables as one, and for each token the entry that each row and column of places uses.

    Returns:
        The table, ([heads,] entries, dim) in `like`'s dtype, and the index, (1 or B, 1, N, H + W) int64. Prefix tokens
        use entry 0, the zero row, throughout.
    """
    rows, row_reach = _within_reach(tables.rows, bucketing, grid, grid.height, places.rows)
    cols, col_reach = _within_reach(tables.cols, bucketing, grid, grid.width, places.cols)
    entries = 1 + 2 * row_reach + 1 + 2 * col_reach + 1
    table = F.pad(torch.cat((rows, cols), dim=-2), (0, 0, 1, -entries % WIDTH_MULTIPLE))

    y, x = _coordinates(grid, like.device)
    row_index = bucket(places.rows - y, row_reach, bucketing) + 1
    col_index = bucket(places.cols - x, col_reach, bucketing) + (1 + 2 * row_reach + 1)
    index = F.pad(_side_by_side(row_index, col_index), (0, 0, grid.prefix, 0))
    return table.to(like.dtype), index[:, None]


def _within_reach(table: Tensor, bucketing: str, grid: Grid, size: int, places: Tensor) -> tuple[Tensor, int]:
    """The part of a table that some pair can use, and the largest offset in it; all of it for free coordinates."""
    distance = (table.shape[-2] - 1) // 2
    # A graph for all sizes must not depend on which of them a table outreaches.
    if grid.coords is not None or bucketing != "clip" or torch.compiler.is_compiling():
        return table, distance
    reach = min(distance, max(size, places.shape[0]) - 1)
    return table[..., distance - reach : distance + reach + 1, :], reach


def _all_places(grid: Grid, device: torch.device) -> Places:
    """All rows and columns of a grid."""
    return Places(torch.arange(grid.height, device=device), torch.arange(grid.width, device=device))


def _query_places(terms: RelativeTerms, grid: Grid, key_grid: Grid, device: torch.device) -> Places:
    """All rows and columns in which queries can lie, as far as keys can tell them apart.

    Queries with coordinates of their own may lie outside the key grid; further out than the tables reach, all places
    are alike.
    """
    if grid.coords is None or grid is key_grid:
        return _all_places(grid, device)
    row_margin, col_margin = (saturation((table.shape[-2] - 1) // 2, terms.bucketing) for table in terms.query)
    return Places(
        torch.arange(-row_margin, key_grid.height + row_margin, device=device),
        torch.arange(-col_margin, key_grid.width + col_margin, device=device),
    )


def _indicators(grid: Grid, places: Places, dtype: torch.dtype) -> Tensor:
    """One-hot row, then one-hot column of each token, zero for prefix tokens: (1 or B, 1, N, H + W).

    Tokens beyond the outermost place count as in it. By comparison instead of `one_hot`, which breaks export with
    symbolic sizes.
    """
    y, x = _coordinates(grid, places.rows.device)
    if grid.coords is not None:
        y = torch.minimum(torch.maximum(y, places.rows[:1]), places.rows[-1:])
        x = torch.minimum(torch.maximum(x, places.cols[:1]), places.cols[-1:])
    hot = _side_by_side(y == places.rows, x == places.cols).to(dtype)
    return F.pad(hot, (0, 0, grid.prefix, 0))[:, None]


def _coordinates(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows (1, H, 1, 1) and columns (1, 1, W, 1) of a raster, or (B, P, 1, 1) each; together they broadcast."""
    if grid.coords is None:
        rows, cols = _all_places(grid, device)
        return rows[None, :, None, None], cols[None, None, :, None]
    coords = grid.coords if grid.coords.dim() == 3 else grid.coords[None]
    y, x = coords.to(torch.int64)[:, :, None, :].split(1, dim=-1)
    return y, x


def _side_by_side(rows: Tensor, cols: Tensor) -> Tensor:
    """Concatenate what belongs to rows and to columns after broadcasting over the tokens: (1 or B, P, H + W)."""
    shape = torch.broadcast_shapes(rows.shape[:-1], cols.shape[:-1])
    return torch.cat((rows.expand(*shape, -1), cols.expand(*shape, -1)), dim=-1).flatten(1, 2)


def _forbidden(dtype: torch.dtype) -> float:
    """A logit (before the scale) that softmax turns into exactly zero, and that the dtype can hold."""
    return -3e4 if dtype == torch.float16 else -1e9


def _width(parts: list[Tensor]) -> int:
    return sum(part.shape[-1] for part in parts)


def _join(parts: list[Tensor], width: int) -> Tensor:
    """Concatenate channels after broadcasting the leading dimensions to the first part's, zeros up to `width`."""
    lead = parts[0].shape[:-1]
    missing = width - _width(parts)
    if missing:
        parts = [*parts, parts[0].new_zeros(()).expand(*lead, missing)]
    return torch.cat([part.expand(*lead, part.shape[-1]) for part in parts], dim=-1)
