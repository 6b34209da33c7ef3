"""Slow reference of relative attention, as Shaw et al. wrote it, with all N x N x head_dim position vectors.

The functions have the same signatures as the public operations, but validate nothing. As in Shaw et al. 2018 (arXiv
1803.02155), section 3.3, the relative logits of n tokens are n matrix products, each of (batch * heads x head_dim) by
(head_dim x n); the other terms of `RelativeTerms` are written the same way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from relvit.ops.buckets import bucket
from relvit.ops.grid import Grid, batched_coords, key_mask, without_padding
from relvit.ops.terms import AxisLogits, AxisTables, JointTable, RelativeTerms, with_width


def relative_logits(
    query: Tensor, terms: RelativeTerms, grid: Grid, key_grid: Grid | None = None
) -> tuple[Tensor, Tensor]:
    """Compute row and column logits of every query; see `relvit.ops.relative_logits`."""
    key_grid = grid if key_grid is None else key_grid
    coords = batched_coords(grid, query.device)
    logits = []
    for axis, (size, table) in enumerate(zip((key_grid.height, key_grid.width), terms.key, strict=True)):
        there = torch.arange(size, device=query.device)
        vectors = _look_up(table, there - coords[..., axis, None], bucketing=terms.bucketing).to(query.dtype)
        # Prefix queries have no coordinates: their relative vectors are zero.
        vectors = F.pad(vectors, (0, 0, 0, 0, grid.prefix, 0))
        logits.append(torch.einsum("bhid,bhijd->bhij", query, vectors))
    return logits[0], logits[1]


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: RelativeTerms,
    grid: Grid,
    key_grid: Grid | None = None,
    *,
    dropout_p: float = 0.0,
    **options: Any,
) -> Tensor:
    """Compute attention with relative terms, term by term as in the paper; see `relvit.ops.relative_attention`."""
    key_grid = grid if key_grid is None else key_grid
    valid = key_mask(key_grid)
    if valid is not None:
        value = without_padding(value, valid)
    weights = F.dropout(attention_weights(query, key, terms, grid, key_grid, **options), dropout_p)
    out = torch.einsum("bhij,bhjd->bhid", weights, value)
    if terms.value is not None:
        vectors = _pair_vectors(terms.value, terms.bucketing, grid, key_grid, value)
        out = out + torch.einsum("bhij,bhijd->bhid", weights, vectors)
    return out


def attention_weights(
    query: Tensor,
    key: Tensor,
    terms: RelativeTerms,
    grid: Grid,
    key_grid: Grid | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute softmax_j(logit_ij), (B, heads, Nq, Nk), of `relvit.ops.relative_attention`, before dropout.

    The weights of each query sum to 1, or are zero if it may attend to no key. For `options` see `attention_logits`.
    """
    key_grid = grid if key_grid is None else key_grid
    logits = attention_logits(query, key, terms, grid, key_grid, **options)
    valid = key_mask(key_grid)
    if is_causal:
        allowed = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~allowed, -torch.inf)
    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
    if valid is not None:
        logits = logits.masked_fill(~rearrange(valid, "b j -> b 1 1 j"), -torch.inf)

    # Softmax of a row that holds only -inf would give NaN, so a query that may attend to no key gets zeros, and zero
    # gradients.
    empty = torch.isneginf(logits).all(dim=-1, keepdim=True)
    return logits.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)


def attention_logits(
    query: Tensor,
    key: Tensor,
    terms: RelativeTerms,
    grid: Grid,
    key_grid: Grid | None = None,
    scale: float | None = None,
    position_query: Tensor | None = None,
    position_key: Tensor | None = None,
    trained_keys: int | None = None,
) -> Tensor:
    """Compute logit_ij, (B, heads, Nq, Nk), of `relvit.ops.relative_attention`, before any mask."""
    key_grid = grid if key_grid is None else key_grid
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if terms.query_bias is not None:
        added = rearrange(terms.query_bias, "h d -> h 1 d")
        query, position_query = query + added, None if position_query is None else position_query + added
    position_query = query if position_query is None else position_query
    position_key = key if position_key is None else position_key
    valid = key_mask(key_grid)
    if valid is not None:
        key, position_key = without_padding(key, valid), without_padding(position_key, valid)

    logits = torch.einsum("bhid,bhjd->bhij", query, key)
    if terms.key is not None:
        vectors = _pair_vectors(terms.key, terms.bucketing, grid, key_grid, query)
        logits = logits + torch.einsum("bhid,bhijd->bhij", position_query, vectors)
    if terms.query is not None:
        vectors = _pair_vectors(terms.query, terms.bucketing, grid, key_grid, key)
        logits = logits + torch.einsum("bhjd,bhijd->bhij", position_key, vectors)
    if terms.axis_logits is not None:
        logits = logits + _pair_logits(terms.axis_logits, key_grid, query)
    logits = logits * scale
    if terms.bias is not None:
        logits = logits + pair_bias(terms, grid, key_grid, query)
    if terms.channels is not None:
        of_queries, of_keys = (part.to(query.dtype).expand(*query.shape[:2], -1, -1) for part in terms.channels)
        if valid is not None:
            of_keys = without_padding(of_keys, valid)
        logits = logits + torch.einsum("bhic,bhjc->bhij", of_queries, of_keys)
    if trained_keys is not None:
        keys = valid.sum(dim=1).clamp(min=1) if valid is not None else torch.full((1,), key.shape[2], device=key.device)
        logits = logits * rearrange(keys.to(logits).log() / math.log(trained_keys), "b -> b 1 1 1")
    return logits


def _pair_logits(logits: AxisLogits, key_grid: Grid, like: Tensor) -> Tensor:
    """Compute r_ij for all pairs of tokens: (B, heads, Nq, Nk), zero where j is a prefix token."""
    rows, cols = (part.to(like.dtype) for part in logits)
    batch, heads, queries, _ = rows.shape
    coords = batched_coords(key_grid, like.device).expand(batch, -1, -1)
    y, x = (of_axis[:, None, None, :].expand(-1, heads, queries, -1) for of_axis in coords.unbind(-1))
    return F.pad(rows.gather(-1, y) + cols.gather(-1, x), (key_grid.prefix, 0))


def pair_bias(terms: RelativeTerms, grid: Grid, key_grid: Grid, like: Tensor) -> Tensor:
    """b_ij for all pairs of tokens: (1 or B, 1 or heads, Nq, Nk), zero where i or j is a prefix token."""
    return _pair_vectors(with_width(terms.bias), terms.bucketing, grid, key_grid, like)[..., 0]


def _look_up(table: Tensor, *offsets: Tensor, bucketing: str) -> Tensor:
    """Table entries at offsets, one per axis: (1 or B, queries, keys) -> (1 or B, 1 or heads, queries, keys, dim)."""
    axes = len(offsets)
    table = table if table.dim() == axes + 2 else table[None]
    sizes = table.shape[1 : 1 + axes]
    index = [bucket(offset, (size - 1) // 2, bucketing) for offset, size in zip(offsets, sizes, strict=True)]
    return rearrange(table[:, *index], "h b i j d -> b h i j d")


def _pair_vectors(tables: AxisTables | JointTable, bucketing: str, grid: Grid, key_grid: Grid, like: Tensor) -> Tensor:
    """a_ij for all pairs of tokens: (1 or B, 1 or heads, Nq, Nk, dim), zero where i or j is a prefix token."""
    offset = batched_coords(key_grid, like.device)[:, None, :, :] - batched_coords(grid, like.device)[:, :, None, :]
    dy, dx = offset.unbind(-1)
    if isinstance(tables, JointTable):
        vectors = _look_up(tables.table, dy, dx, bucketing=bucketing)
    else:
        rows, cols = tables
        vectors = _look_up(rows, dy, bucketing=bucketing) + _look_up(cols, dx, bucketing=bucketing)
    return F.pad(vectors, (0, 0, key_grid.prefix, 0, grid.prefix, 0)).to(like.dtype)
