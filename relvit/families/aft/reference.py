"""Slow, readable reference of attention-free transformers: one softmax per query and channel, in double precision.

Zhai et al. 2021 (arXiv 2105.14103), eq. 2: Y_i = sigmoid(Q_i) * sum_j exp(K_j + w_ij) V_j / sum_j exp(K_j + w_ij), with
elementwise products. The quotient is an average of V_j with the weights of a softmax over K_j + w_ij. This reference
computes the softmax from logits of every pair of tokens in every channel, in O(N^2 dim) memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from relvit.ops.grid import Grid, key_mask, patch_coords, token_places, without_padding


def aft_full(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, grid: Grid, *, is_causal: bool = False) -> Tensor:
    """Compute the paper's eq. 2; see `operations.aft_full`."""
    place = token_places(grid, query.device)
    # `_average` takes the batch before the heads, (1 or B, heads, queries, keys), so exchange the first two axes.
    pairs = rearrange(bias, "... i j -> (...) i j")[:, place[:, :, None], place[:, None, :]].transpose(0, 1)
    return _average(query, key, value, pairs, grid, is_causal)


def aft_local(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    window: int | tuple[int, int],
    grid: Grid,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Compute the paper's eq. 4: w_ij = 0 at a distance of `window` or more; see `operations.aft_local`."""
    rows, cols = (window, window) if isinstance(window, int) else window
    dy, dx = _offsets(Grid(grid.height, grid.width, grid.prefix), query.device)
    near = (dy.abs() < rows) & (dx.abs() < cols)
    # Prefix tokens have no row and column, so pairs with them keep their bias; but a window of 0 removes all biases.
    near = F.pad(near, (grid.prefix, 0, grid.prefix, 0), value=min(rows, cols) > 0)
    return aft_full(query, key, value, torch.where(near, bias, 0.0), grid, is_causal=is_causal)


def aft_simple(query: Tensor, key: Tensor, value: Tensor, grid: Grid, *, is_causal: bool = False) -> Tensor:
    """Compute the paper's section 3.2, w = 0; see `operations.aft_simple`."""
    return _average(query, key, value, query.new_zeros(1, 1, 1, 1), grid, is_causal)


def aft_conv(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, grid: Grid, *, is_causal: bool = False
) -> Tensor:
    """Compute the paper's eq. 6: w depends on the offset alone, 0 outside of a window; see `operations.aft_conv`."""
    reach = [size // 2 for size in weight.shape[1:]]
    dy, dx = _offsets(grid, query.device)
    inside = (dy.abs() <= reach[0]) & (dx.abs() <= reach[1])
    index = [offset.clamp(-most, most) + most for offset, most in zip((dy, dx), reach, strict=True)]
    pairs = torch.where(inside, weight[:, index[0], index[1]], 0.0)
    pairs = rearrange(pairs, "h ... i j -> (...) h i j")
    return _average(query, key, value, F.pad(pairs, (grid.prefix, 0, grid.prefix, 0)), grid, is_causal)


def _average(query: Tensor, key: Tensor, value: Tensor, pairs: Tensor, grid: Grid, is_causal: bool) -> Tensor:
    """Compute gated averages of the values; `pairs`, (1 or B, 1 or heads, N or 1, N or 1), is w."""
    valid = key_mask(grid)
    if valid is not None:
        key, value = without_padding(key, valid), without_padding(value, valid)
    logits = pairs.double()[..., None] + rearrange(key.double(), "b h j c -> b h 1 j c")
    logits = logits.expand(-1, -1, query.shape[2], -1, -1)
    if is_causal:
        later = torch.ones(logits.shape[2:4], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(later[..., None], -torch.inf)
    if valid is not None:
        logits = logits.masked_fill(~rearrange(valid, "b j -> b 1 1 j 1"), -torch.inf)
    # If no key is left for a query, the softmax would be NaN: give the query weights of zero, and so gradients of zero.
    empty = torch.isneginf(logits).all(dim=3, keepdim=True)
    weights = logits.masked_fill(empty, 0.0).softmax(dim=3).masked_fill(empty, 0.0)
    average = (weights * rearrange(value.double(), "b h j d -> b h 1 j d")).sum(dim=3)
    return (query.double().sigmoid() * average).to(query.dtype)


def _offsets(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the offsets in rows and in columns, key j minus query i, ([B,] patches, patches) each."""
    coords = patch_coords(grid, device)
    offset = coords[..., None, :, :] - coords[..., :, None, :]
    return offset[..., 0], offset[..., 1]
