"""Relative attention for joint tables and torch.func: tiles of queries in which every pair looks up its table entries.

Joint tables do not split into rows and columns. So the other fast backends take a joint table only as the bias, and
only on grids without `coords`; `_choose` in `ops/attention.py` says where 'auto' prefers one of these backends.
`torch.func` uses this backend, too, because it can transform only plain operations, which have derivatives of any
order.

One product with all table rows gives each query's logit for each offset; a pair of tokens then looks up the logit of
its offset. Each tile forms its logits against all keys, and backward recomputes them, so no N x N tensor is stored
(Rabe & Staats 2021, arXiv 2112.05682), except in exported graphs and inside `torch.func`, where one tile holds all
queries.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.buckets import bucket
from relvit.ops.grid import Grid, batched_coords, key_mask, without_padding
from relvit.ops.inputs import AttentionInputs
from relvit.ops.recompute import recomputed
from relvit.ops.terms import AxisLogits, AxisTables, JointTable, RelativeTerms, with_width
from relvit.ops.tracing import may_recompute, without_autocast

# A tile has at most this number of logits, over all samples and heads, 16 MB in float32, but at least `LEAST_QUERIES`
# queries.
TILE_LOGITS = 1 << 22
LEAST_QUERIES = 16


class Tokens(NamedTuple):
    """Rows and columns of tokens, (1 or B, N) int64, and (N,) booleans: True for patches, False for prefix tokens."""

    y: Tensor
    x: Tensor
    on_grid: Tensor


def relative_attention(inputs: AttentionInputs) -> Tensor:
    """Compute attention with relative terms, tile by tile; see `relvit.ops.relative_attention`."""
    query, key, position_query, mask = inputs.query, inputs.key, inputs.position_query, inputs.attn_mask
    terms, logits = inputs.terms, inputs.terms.axis_logits
    # All tiles add to the gradients of tables, and of a mask that all queries share, so convert these tensors here: in
    # half precision each addition would be rounded.
    for name, tables in zip(RelativeTerms._fields[:4], (*terms,)[:4], strict=True):
        if tables is not None:
            terms = terms._replace(**{name: type(tables)(*(table.to(query.dtype) for table in tables))})
    if mask is not None and mask.is_floating_point() and mask.shape[-2] == 1:
        mask = mask.to(query.dtype)
    inputs = inputs._replace(terms=terms, attn_mask=mask)
    # Backward recomputes tiles with autocast on or off as in forward, so switching autocast off here is enough.
    with without_autocast(query.device):
        queries, keys = _tokens(inputs.grid, query.device), _tokens(inputs.key_grid, key.device)
        if not may_recompute():
            # A graph for all sizes does not know the number of tiles, and transforms of `torch.func` cannot recompute
            # tiles: compute all queries at once.
            return _attend(inputs, queries, keys, 0)
        length, step = query.shape[2], tile_queries(query, key)
        tiles = []
        # Without queries there is one empty tile, so that keys and values have gradients, which are zero.
        for start in range(0, max(1, length), step):
            part, of_tile = slice(start, start + step), terms
            if logits is not None:
                of_tile = terms._replace(axis_logits=AxisLogits(*(of_axis[:, :, part] for of_axis in logits)))
            tile = inputs._replace(
                query=query[:, :, part],
                terms=of_tile,
                position_query=position_query[:, :, part],
                attn_mask=mask[..., part, :] if mask is not None and mask.shape[-2] > 1 else mask,
            )
            here = Tokens(queries.y[:, part], queries.x[:, part], queries.on_grid[part])
            tiles.append(recomputed(_attend, tile, here, keys, start, preserve_rng_state=inputs.dropout_p > 0))
        return torch.cat(tiles, dim=2)


def tile_queries(query: Tensor, key: Tensor) -> int:
    """Return the largest number of queries of a tile."""
    return max(LEAST_QUERIES, TILE_LOGITS // max(1, query.shape[0] * query.shape[1] * key.shape[2]))


def _attend(inputs: AttentionInputs, queries: Tokens, keys: Tokens, first: int) -> Tensor:
    """Attend from a tile of queries, which begins with query number `first`: (B, heads, queries, value_dim)."""
    query, key, value, terms, mask = inputs.query, inputs.key, inputs.value, inputs.terms, inputs.attn_mask
    position_query, position_key = inputs.position_query, inputs.position_key
    dy = keys.y[:, None, :] - queries.y[:, :, None]
    dx = keys.x[:, None, :] - queries.x[:, :, None]
    on_grid = queries.on_grid[:, None] & keys.on_grid
    valid = key_mask(inputs.key_grid)
    if valid is not None:
        key, position_key, value = (without_padding(tensor, valid) for tensor in (key, position_key, value))
    entries = partial(_entries, dy=dy, dx=dx, on_grid=on_grid, bucketing=terms.bucketing)

    logits = query @ key.transpose(-2, -1)
    if terms.key is not None:
        table, indices = entries(terms.key)
        per_offset = position_query @ table.transpose(-2, -1)
        for index in indices:
            logits = logits + per_offset.gather(-1, index.expand_as(logits))
    if terms.query is not None:
        table, indices = entries(terms.query)
        per_offset = position_key @ table.transpose(-2, -1)
        for index in indices:
            # Do not use `mT`: the ONNX exporter for traces, timm's default in `onnx_export`, has no operator for it.
            of_keys = index.transpose(-2, -1).expand_as(logits.transpose(-2, -1))
            logits = logits + per_offset.gather(-1, of_keys).transpose(-2, -1)
    if terms.axis_logits is not None:
        for of_axis, place in zip(terms.axis_logits, (keys.y, keys.x), strict=True):
            # Prefix keys read the zero that `F.pad` puts after the last row or column, so they get the index of that
            # zero.
            place = place.masked_fill(~keys.on_grid, of_axis.shape[-1])[:, None, None]
            padded = F.pad(of_axis.to(logits.dtype), (0, 1))
            logits = logits + padded.gather(-1, place.expand(*logits.shape[:-1], -1))
    logits = logits * inputs.scale
    if terms.bias is not None:
        table, indices = entries(with_width(terms.bias))
        per_head = table[..., 0] if table.dim() == 3 else table[..., 0].expand(query.shape[1], -1)
        for index in indices:
            logits = logits + per_head[:, index[:, 0]].transpose(0, 1)

    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if inputs.is_causal:
        there = torch.arange(key.shape[2], device=key.device)
        here = torch.arange(first, first + query.shape[2], device=key.device)
        logits = logits.masked_fill(there > here[:, None], -torch.inf)
    if valid is not None:
        logits = logits.masked_fill(~valid[:, None, None, :], -torch.inf)
    if valid is None and mask is None:
        weights = logits.softmax(dim=-1)
    else:
        # Softmax of a row that holds only -inf would give NaN, so a query that may attend to no key gets zeros, forward
        # and backward.
        empty = torch.isneginf(logits).all(dim=-1, keepdim=True)
        weights = logits.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)
    weights = F.dropout(weights, inputs.dropout_p)

    out = weights @ value
    if terms.value is not None:
        table, indices = entries(terms.value)
        per_offset = weights.new_zeros(*weights.shape[:-1], table.shape[-2])
        for index in indices:
            per_offset = per_offset.scatter_add(-1, index.expand_as(weights), weights)
        out = out + per_offset @ table
    return out


def _entries(
    tables: AxisTables | JointTable, *, dy: Tensor, dx: Tensor, on_grid: Tensor, bucketing: str
) -> tuple[Tensor, list[Tensor]]:
    """Join all rows of the tables, a zero row last, ([heads,] entries, width); index the rows whose sum a pair needs.

    For a joint table there is one index tensor, for tables per axis there are two, (1 or B, 1, queries, Nk) each.
    """
    if isinstance(tables, JointTable):
        height, width = tables.table.shape[-3:-1]
        flat = tables.table.flatten(-3, -2)
    else:
        flat = torch.cat((tables.rows, tables.cols), dim=-2)
        height, width = tables.rows.shape[-2], tables.cols.shape[-2]
    row, col = bucket(dy, (height - 1) // 2, bucketing), bucket(dx, (width - 1) // 2, bucketing)
    indices = [row * width + col] if isinstance(tables, JointTable) else [row, col + height]
    zero_row = flat.shape[-2]
    return F.pad(flat, (0, 0, 0, 1)), [index.masked_fill(~on_grid, zero_row)[:, None] for index in indices]


def _tokens(grid: Grid, device: torch.device) -> Tokens:
    # Prefix tokens get the coordinates (0, 0), which have no effect, because `on_grid` is False for these tokens.
    coords = F.pad(batched_coords(grid, device), (0, 0, grid.prefix, 0))
    return Tokens(coords[..., 0], coords[..., 1], torch.arange(coords.shape[1], device=device) >= grid.prefix)
