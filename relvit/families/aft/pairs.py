"""AFT averages by pairs of tokens: a softmax per query and channel, exact for any bias, causal too, O(N^2 dim) time."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.grid import Grid, batched_coords, token_places, without_padding
from relvit.ops.recompute import recomputed

# Averages are computed in tiles: each tile computes a range of queries. A tile has at most this many logits, or, if a
# single query has more, the logits of one query.
TILE_LOGITS = 2**24


def average_of_pairs(
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    bias_of: Callable[[Tensor, int, int], Tensor],
    valid: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """Compute sum_j softmax_j(key_j + w_ij) value_j in each channel; zero where there is no key.

    Backward computes the logits once more, tile by tile, so forward keeps no logits.

    Args:
        key: (B, heads, N, head_dim) or (B, heads, N, 1).
        value: (B, heads, N, head_dim).
        bias: tensor in which `bias_of` looks up w. `bias_of` may read no other tensor that needs a gradient, because
            only `bias` gets one.
        bias_of: function of `bias`, `first` and `last`; it returns w for the queries first ... last - 1, (1 or B, 1 or
            heads, queries, N).
        valid: (1 or B, N), False for padding.
        is_causal: whether to leave out keys that come later than the query.

    Returns:
        (B, heads, N, head_dim), in float32 at least.
    """
    precision = torch.promote_types(key.dtype, torch.float32)
    key, value = key.to(precision), value.to(precision)
    if valid is not None:
        key, value = without_padding(key, valid), without_padding(value, valid)
    batch, heads, count, width = key.shape
    size = max(1, TILE_LOGITS // max(1, batch * heads * count * width))

    def tile(key: Tensor, value: Tensor, bias: Tensor, first: int) -> Tensor:
        last = min(first + size, count)
        key, pairs = key[:, :, None], bias_of(bias, first, last).to(precision)[..., None]
        allowed: Tensor | None = None if valid is None else valid[:, None, None, :, None]
        if is_causal:
            index = torch.arange(count, device=key.device)
            earlier = (index <= index[first:last, None])[None, None, ..., None]
            allowed = earlier if allowed is None else earlier & allowed
        top = (key + pairs).detach()
        top = (top if allowed is None else top.masked_fill(~allowed, -torch.inf)).argmax(dim=3, keepdim=True)
        # For each query find the token with the largest sum of key and bias. Subtract this token's key from all keys
        # and its bias from all biases, and only then add keys and biases: the sum of a large key and a small bias would
        # round the bias away.
        of_top = (part.detach().expand(*top.shape[:3], count, top.shape[4]).gather(3, top) for part in (key, pairs))
        key, pairs = (part - at_top for part, at_top in zip((key, pairs), of_top, strict=True))
        logits = key + pairs
        if allowed is None:
            weights = logits.softmax(dim=3)
        else:
            empty = ~allowed.any(dim=3, keepdim=True)
            logits = logits.masked_fill(~allowed, -torch.inf).masked_fill(empty, 0.0)
            weights = logits.softmax(dim=3).masked_fill(empty, 0.0)
        if weights.shape[-1] == 1:
            return weights[..., 0] @ value
        return torch.einsum("bhijc,bhjc->bhic", weights, value)

    return torch.cat([recomputed(tile, key, value, bias, first) for first in range(0, count, size)], dim=2)


def place_bias(grid: Grid, device: torch.device) -> Callable[[Tensor, int, int], Tensor]:
    """Make the `bias_of` of `average_of_pairs` for a bias (1 or heads, places, places)."""
    place = token_places(grid, device)
    return lambda bias, first, last: bias[:, place[:, first:last, None], place[:, None, :]].transpose(0, 1)


def window_bias(grid: Grid, device: torch.device) -> Callable[[Tensor, int, int], Tensor]:
    """Make the `bias_of` of `average_of_pairs` for windows (heads, rows, columns) by offset."""
    coords = F.pad(batched_coords(grid, device), (0, 0, grid.prefix, 0))
    placed = torch.arange(coords.shape[1], device=device) >= grid.prefix

    def bias_of(weight: Tensor, first: int, last: int) -> Tensor:
        near, index = placed[first:last, None] & placed, []
        for axis, size in enumerate(weight.shape[1:]):
            offset = coords[:, None, :, axis] - coords[:, first:last, None, axis]
            near = near & (offset.abs() <= size // 2)
            index.append(offset.clamp(-(size // 2), size // 2) + size // 2)
        return torch.where(near, weight[:, index[0], index[1]], 0.0).transpose(0, 1)

    return bias_of
