"""Averages over all pairs of tokens, exact whatever the weights are: a softmax per query and channel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from relvit.ops.grid import without_padding
from relvit.ops.recompute import recomputed
from relvit.ops.tracing import is_compiling, is_functorch

# How many logits are formed at a time, and for how many queries at least.
TILE_LOGITS = 2**24
LEAST_QUERIES = 1


def average_of_pairs(
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    bias_of: Callable[[Tensor, int, int], Tensor],
    valid: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """sum_j softmax_j(key_j + w_ij) value_j in each channel; zero where there is no key.

    O(N^2 dim) time. Nothing of that size is kept for backward, which computes each tile again.

    Args:
        key: (B, heads, N, head_dim) or (B, heads, N, 1).
        value: (B, heads, N, head_dim).
        bias: what w is looked up in, the only tensor with a gradient that `bias_of` reads.
        bias_of: from `bias` and two numbers w of the queries from the one up to the other, (1 or B, 1 or heads,
            queries, N).
        valid: (1 or B, N), False where a token does not count.
        is_causal: leave out keys that come later than the query.

    Returns:
        (B, heads, N, head_dim), in float32 at least.
    """
    precision = torch.promote_types(key.dtype, torch.float32)
    key, value = key.to(precision), value.to(precision)
    if valid is not None:
        key, value = without_padding(key, valid), without_padding(value, valid)
    batch, heads, count, width = key.shape
    size = max(LEAST_QUERIES, TILE_LOGITS // max(1, batch * heads * count * width))

    def tile(key: Tensor, value: Tensor, bias: Tensor, first: int) -> Tensor:
        last = min(first + size, count)
        key, pairs = key[:, :, None], bias_of(bias, first, last).to(precision)[..., None]
        allowed: Tensor | None = None if valid is None else valid[:, None, None, :, None]
        if is_causal:
            places = torch.arange(count, device=key.device)
            earlier = (places <= places[first:last, None])[None, None, ..., None]
            allowed = earlier if allowed is None else earlier & allowed
        top = (key + pairs).detach()
        top = (top if allowed is None else top.masked_fill(~allowed, -torch.inf)).argmax(dim=3, keepdim=True)
        # Keys and biases relative to those of the largest sum that the query may see, each by itself: in the sum of a
        # large key and a small bias the bias would be rounded away.
        of_top = (part.detach().expand(*top.shape[:3], count, top.shape[4]).gather(3, top) for part in (key, pairs))
        key, pairs = (part - at_top for part, at_top in zip((key, pairs), of_top, strict=True))
        logits = key + pairs
        if allowed is None:
            return _weighted(logits.softmax(dim=3), value)
        empty = ~allowed.any(dim=3, keepdim=True)
        logits = logits.masked_fill(~allowed, -torch.inf).masked_fill(empty, 0.0)
        return _weighted(logits.softmax(dim=3).masked_fill(empty, 0.0), value)

    again = torch.is_grad_enabled() and not is_compiling() and not is_functorch()
    tiles = [
        recomputed(tile, key, value, bias, first) if again else tile(key, value, bias, first)
        for first in range(0, count, size)
    ]
    return torch.cat(tiles, dim=2)


def _weighted(weights: Tensor, value: Tensor) -> Tensor:
    """sum_j weights_ij value_j: (B, heads, queries, N, head_dim or 1) and (B, heads, N, head_dim)."""
    if weights.shape[-1] == 1:
        return weights[..., 0] @ value
    return torch.einsum("bhijc,bhjc->bhic", weights, value)


def average_so_far(key: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
    """sum over j <= i of softmax_j(key_j) value_j in each channel, for each i, in log2 N steps over all tokens.

    After each step a token knows the sums over twice as many predecessors, relative to the largest key among them:
    nothing overflows, and nothing is lost that is not smaller than rounding.

    Args, returns: as `average_of_pairs`.
    """
    precision = torch.promote_types(key.dtype, torch.float32)
    top, numerator = key.to(precision), value.to(precision)
    lowest = torch.finfo(precision).min
    denominator = torch.ones_like(top)
    if valid is not None:
        absent = ~valid[:, None, :, None]
        top, numerator = top.masked_fill(absent, lowest), numerator.masked_fill(absent, 0.0)
        denominator = denominator.masked_fill(absent, 0.0)
    step = 1
    while step < key.shape[2]:
        before = slice(None, -step)
        highest = torch.cat((top[:, :, :step], torch.maximum(top[:, :, step:], top[:, :, before])), dim=2)
        here, there = (top - highest).exp(), (top[:, :, before] - highest[:, :, step:]).exp()
        numerator = _plus_shifted(here * numerator, there * numerator[:, :, before], step)
        denominator = _plus_shifted(here * denominator, there * denominator[:, :, before], step)
        top, step = highest, 2 * step
    return numerator / torch.where(denominator == 0, 1.0, denominator)


def _plus_shifted(sums: Tensor, earlier: Tensor, step: int) -> Tensor:
    return torch.cat((sums[:, :, :step], sums[:, :, step:] + earlier), dim=2)
