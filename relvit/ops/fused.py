"""Exact relative attention as one stock fused attention over longer vectors.

With rows and columns apart, q_i . a^K_ij is one of H row logits plus one of W column logits of the query i. So append
those H + W logits to the query and one-hot indicators of row and column to the key: the dot product of the longer
vectors is content plus relative logit. Append the same indicators to the value: the extra output channels are the
attention's row and column marginals, and these times the value tables are the value-side term. Nothing of N x N is
formed here; `scaled_dot_product_attention` computes the rest and its gradients in O(N (H + W)) extra memory.

Prior art for the parts: SAM 3's `concat_rel_pos` (key side), FlashBias (low-rank biases, arXiv 2505.12044), FlashIPA
(value-side concatenation).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.grid import Grid, key_mask
from relvit.ops.terms import AxisTables, RelativeTerms

# Stock kernels want head widths that are multiples of 8, and are faster for it on the CPU as well.
WIDTH_MULTIPLE = 8


def relative_logits(
    query: Tensor, terms: RelativeTerms, grid: Grid, key_grid: Grid | None = None
) -> tuple[Tensor, Tensor]:
    """Row and column logits of every query; see `relvit.ops.relative_logits`."""
    key_grid = grid if key_grid is None else key_grid
    logits = _axis_logits(query, terms.key, grid, key_grid)
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
    places = key_grid.height + key_grid.width
    indicators = _indicators(key_grid, key)
    valid = key_mask(key_grid)

    long_query, long_key, long_value = [query], [key], [value]
    if terms.key is not None:
        long_query.append(_axis_logits(query, terms.key, grid, key_grid))
        long_key.append(indicators)
    if valid is not None:
        long_query.append(query.new_ones(()).expand(*query.shape[:-1], 1))
        long_key.append(torch.where(valid, 0.0, _forbidden(key.dtype)).to(key.dtype)[:, None, :, None])
    if terms.value is not None:
        long_value.append(indicators)

    # All three get one width: where value and query differ, the CPU kernel falls back to keeping N x N.
    width = max(_width(long_query), _width(long_value))
    width += -width % WIDTH_MULTIPLE
    out = F.scaled_dot_product_attention(
        _join(long_query, width),
        _join(long_key, width),
        _join(long_value, width),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
    )

    content = value.shape[-1]
    result = out[..., :content]
    if terms.value is not None:
        marginals = out[..., content : content + places]
        result = result + _axis_values(marginals, terms.value, grid, key_grid)
    if valid is not None:
        # A sample without any valid key has attended to its padding: it gets zeros, forward and backward.
        result = torch.where(valid.any(dim=1)[:, None, None, None], result, 0.0)
    return result


def _axis_logits(query: Tensor, tables: AxisTables, grid: Grid, key_grid: Grid) -> Tensor:
    """q_i . rows[clip(r - y_i)] for all H rows r, then the same for all W columns: (B, heads, Nq, H + W).

    One product with all table rows, then a gather, is faster than a product per row of the grid: the tables are short.
    """
    table, index = _joint_table(tables, grid, key_grid, query)
    per_offset = query @ table.transpose(-2, -1)
    return per_offset.gather(-1, index.expand(*query.shape[:-1], -1))


def _axis_values(marginals: Tensor, tables: AxisTables, grid: Grid, key_grid: Grid) -> Tensor:
    """Sum over rows and columns of marginal times table row, the transpose of `_axis_logits`: (B, heads, Nq, dim)."""
    table, index = _joint_table(tables, grid, key_grid, marginals)
    per_offset = marginals.new_zeros(*marginals.shape[:-1], table.shape[-2])
    return per_offset.scatter_add(-1, index.expand_as(marginals), marginals) @ table


def _joint_table(tables: AxisTables, grid: Grid, key_grid: Grid, like: Tensor) -> tuple[Tensor, Tensor]:
    """Both tables as one, with zero rows below, and for each query the entry that each row and column of the grid uses.

    Returns:
        The table, ([heads,] entries, dim) in `like`'s dtype, and the index, (1 or B, 1, Nq, H + W) int64. Prefix
        queries use the first zero row throughout.
    """
    rows, row_reach = _within_reach(tables.rows, grid, grid.height, key_grid.height)
    cols, col_reach = _within_reach(tables.cols, grid, grid.width, key_grid.width)
    nowhere = 2 * row_reach + 1 + 2 * col_reach + 1
    table = F.pad(torch.cat((rows, cols), dim=-2), (0, 0, 0, WIDTH_MULTIPLE - nowhere % WIDTH_MULTIPLE))

    key_rows = torch.arange(key_grid.height, device=like.device)
    key_cols = torch.arange(key_grid.width, device=like.device)
    if grid.coords is None:
        y = torch.arange(grid.height, device=like.device)[None, :, None, None]
        x = torch.arange(grid.width, device=like.device)[None, None, :, None]
    else:
        coords = grid.coords if grid.coords.dim() == 3 else grid.coords[None]
        y, x = coords.to(torch.int64)[:, :, None, :].split(1, dim=-1)
    row_index = (key_rows - y).clamp(-row_reach, row_reach) + row_reach
    col_index = (key_cols - x).clamp(-col_reach, col_reach) + (2 * row_reach + 1 + col_reach)
    shape = torch.broadcast_shapes(row_index.shape[:-1], col_index.shape[:-1])
    index = torch.cat((row_index.expand(*shape, -1), col_index.expand(*shape, -1)), dim=-1).flatten(1, 2)
    index = F.pad(index, (0, 0, grid.prefix, 0), value=nowhere)
    return table.to(like.dtype), index[:, None]


def _within_reach(table: Tensor, grid: Grid, query_size: int, key_size: int) -> tuple[Tensor, int]:
    """The part of a table that some pair can use, and the largest offset in it; all of it for free coordinates."""
    distance = (table.shape[-2] - 1) // 2
    if grid.coords is not None:
        return table, distance
    reach = torch.sym_min(distance, torch.sym_max(query_size, key_size) - 1)
    return table[..., distance - reach : distance + reach + 1, :], reach


def _indicators(grid: Grid, like: Tensor) -> Tensor:
    """One-hot row, then one-hot column of each key, zero for prefix tokens: (1 or B, 1, N, H + W), in `like`'s dtype.

    By comparison instead of `one_hot`, which breaks export with symbolic sizes.
    """
    rows = torch.arange(grid.height, device=like.device)
    cols = torch.arange(grid.width, device=like.device)
    if grid.coords is None:
        y, x = rows[None, :, None, None], cols[None, None, :, None]
    else:
        coords = grid.coords if grid.coords.dim() == 3 else grid.coords[None]
        y, x = coords[:, :, None, :].split(1, dim=-1)
    in_row, in_col = y == rows, x == cols
    shape = torch.broadcast_shapes(in_row.shape[:-1], in_col.shape[:-1])
    hot = torch.cat((in_row.expand(*shape, -1), in_col.expand(*shape, -1)), dim=-1).flatten(1, 2)
    return F.pad(hot.to(like.dtype), (0, 0, grid.prefix, 0))[:, None]


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
