"""Exact relative attention in tiles of queries in which every pair of tokens looks up its table entries.

So it serves joint tables, which do not split into rows and columns, and it is made of plain operations alone, which
`torch.func` transforms and which have derivatives of any order. As in `fused`, one product with all table rows gives
each query's logit for each offset; a pair of tokens then picks its own. Each tile forms its logits against all keys,
and backward computes them again: N x N is never stored (Rabe & Staats 2021, arXiv 2112.05682).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.buckets import bucket
from relvit.ops.grid import Grid, key_mask, patch_coords, without_padding
from relvit.ops.precision import without_autocast
from relvit.ops.recompute import recomputed
from relvit.ops.terms import AxisTables, JointTable, RelativeTerms
from relvit.ops.transforms import in_transform

# Logits of one tile, over all samples and heads: 4 M numbers, 16 MB in float32.
TILE_LOGITS = 1 << 22
LEAST_QUERIES = 16


class Tokens(NamedTuple):
    """Where tokens lie: rows and columns, (1 or B, N) int64, and which of them have a place, (N,) booleans."""

    y: Tensor
    x: Tensor
    placed: Tensor


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
    position_query: Tensor | None = None,
    position_key: Tensor | None = None,
) -> Tensor:
    """Attention with relative terms, tile by tile; see `relvit.ops.relative_attention`."""
    key_grid = grid if key_grid is None else key_grid
    # At least single precision, as inside fused kernels: logits, softmax, sums over tiles would lose too much.
    dtype = query.dtype
    precision = torch.promote_types(dtype, torch.float32)
    query, key, value = (t.to(precision) for t in (query, key, value))
    position_query = query if position_query is None else position_query.to(precision)
    position_key = key if position_key is None else position_key.to(precision)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    keys, valid = _tokens(key_grid, key.device), key_mask(key_grid)
    common = (key, position_key, value, terms, keys, valid, dropout_p, scale)
    # Backward computes tiles again under the autocast state of here.
    with without_autocast(query.device):
        queries = _tokens(grid, query.device)
        if torch.compiler.is_exporting() or torch.jit.is_tracing() or in_transform():
            # The number of tiles is not known in a graph for all sizes, and transforms cannot form tiles again.
            return _attend(query, position_query, queries, attn_mask, 0 if is_causal else None, *common).to(dtype)
        attend = _attend
        if torch.is_grad_enabled():
            attend = partial(recomputed, _attend, preserve_rng_state=dropout_p > 0)
        tiles = []
        for part in _parts(query, key):
            here = Tokens(queries.y[:, part], queries.x[:, part], queries.placed[part])
            mask = attn_mask
            if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
                mask = mask[..., part, :]
            first = part.start if is_causal else None
            tiles.append(attend(query[:, :, part], position_query[:, :, part], here, mask, first, *common))
        out = torch.cat(tiles, dim=2) if tiles else value.new_zeros(*query.shape[:3], value.shape[-1])
        return out.to(dtype)


def _parts(query: Tensor, key: Tensor) -> Iterator[slice]:
    batch, heads, length, _ = query.shape
    step = max(LEAST_QUERIES, TILE_LOGITS // max(1, batch * heads * key.shape[2]))
    for start in range(0, length, step):
        yield slice(start, start + step)


def _attend(
    query: Tensor,
    position_query: Tensor,
    queries: Tokens,
    attn_mask: Tensor | None,
    causal_start: int | None,
    key: Tensor,
    position_key: Tensor,
    value: Tensor,
    terms: RelativeTerms,
    keys: Tokens,
    valid: Tensor | None,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """Attention of a tile of queries to all keys: (B, heads, T, value_dim)."""
    dy = keys.y[:, None, :] - queries.y[:, :, None]
    dx = keys.x[:, None, :] - queries.x[:, :, None]
    placed = queries.placed[:, None] & keys.placed
    if valid is not None:
        key, position_key, value = (without_padding(tensor, valid) for tensor in (key, position_key, value))
    entries = partial(_entries, dy=dy, dx=dx, placed=placed, bucketing=terms.bucketing)

    logits = query @ key.transpose(-2, -1)
    if terms.key is not None:
        table, picks = entries(terms.key, query.dtype)
        per_offset = position_query @ table.transpose(-2, -1)
        for pick in picks:
            logits = logits + per_offset.gather(-1, pick.expand_as(logits))
    if terms.query is not None:
        table, picks = entries(terms.query, key.dtype)
        per_offset = position_key @ table.transpose(-2, -1)
        for pick in picks:
            logits = logits + per_offset.gather(-1, pick.transpose(-2, -1).expand_as(logits.mT)).mT
    logits = logits * scale
    if terms.bias is not None:
        table, picks = entries(_with_width(terms.bias), logits.dtype)
        per_head = table[..., 0] if table.dim() == 3 else table[..., 0].expand(query.shape[1], -1)
        for pick in picks:
            logits = logits + per_head[:, pick[:, 0]].transpose(0, 1)

    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
    if causal_start is not None:
        later = torch.arange(key.shape[2], device=key.device)
        here = torch.arange(causal_start, causal_start + query.shape[2], device=key.device)
        logits = logits.masked_fill(later > here[:, None], -torch.inf)
    if valid is not None:
        logits = logits.masked_fill(~valid[:, None, None, :], -torch.inf)
    if valid is None and attn_mask is None:
        weights = logits.softmax(dim=-1)
    else:
        # A query that may attend to nothing gets zeros, forward and backward, instead of NaN.
        empty = torch.isneginf(logits).all(dim=-1, keepdim=True)
        weights = logits.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    weights = F.dropout(weights, dropout_p)

    out = weights @ value
    if terms.value is not None:
        table, picks = entries(terms.value, value.dtype)
        per_offset = weights.new_zeros(*weights.shape[:-1], table.shape[-2])
        for pick in picks:
            per_offset = per_offset.scatter_add(-1, pick.expand_as(weights), weights)
        out = out + per_offset @ table
    return out


def _entries(
    tables: AxisTables | JointTable, dtype: torch.dtype, *, dy: Tensor, dx: Tensor, placed: Tensor, bucketing: str
) -> tuple[Tensor, list[Tensor]]:
    """All rows of the tables below each other, a zero row last, and the rows that each pair uses.

    Returns:
        The rows, ([heads,] entries, width), and index tensors, (1 or B, 1, T, Nk) each, whose rows are to be added up.
    """
    if isinstance(tables, JointTable):
        height, width = tables.table.shape[-3:-1]
        flat = tables.table.flatten(-3, -2)
        row, col = bucket(dy, (height - 1) // 2, bucketing), bucket(dx, (width - 1) // 2, bucketing)
        picks = [row * width + col]
    else:
        flat = torch.cat((tables.rows, tables.cols), dim=-2)
        height, width = tables.rows.shape[-2], tables.cols.shape[-2]
        picks = [bucket(dy, (height - 1) // 2, bucketing), bucket(dx, (width - 1) // 2, bucketing) + height]
    nowhere = flat.shape[-2]
    picks = [pick.masked_fill(~placed, nowhere)[:, None] for pick in picks]
    return F.pad(flat, (0, 0, 0, 1)).to(dtype), picks


def _with_width(tables: AxisTables | JointTable) -> AxisTables | JointTable:
    """Scalar tables as tables of vectors of width 1."""
    return type(tables)(*(table[..., None] for table in tables))


def _tokens(grid: Grid, device: torch.device) -> Tokens:
    coords = patch_coords(grid, device)
    coords = coords if coords.dim() == 3 else coords[None]
    # Prefix tokens get any coordinates; `placed` keeps them from being used.
    coords = F.pad(coords, (0, 0, grid.prefix, 0))
    placed = torch.arange(coords.shape[1], device=device) >= grid.prefix
    return Tokens(coords[..., 0], coords[..., 1], placed)
