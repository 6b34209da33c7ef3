"""The sums of `aft_conv`: weights exp(w) in a window around each place, one everywhere else."""

from __future__ import annotations

import torch
from torch import Tensor

from relvit.ops.aft.channels import from_channels, per_channel, to_channels
from relvit.ops.aft.depthwise import depthwise
from relvit.ops.aft.exponentials import Sums, bounded_exp, pad_window
from relvit.ops.aft.toeplitz import toeplitz_sums


def toeplitz(weight: Tensor, top: Tensor, parts: Sums, height: int, width: int) -> Sums:
    """By products with Toeplitz matrices: of the whole raster, or row by row of the rows that the window reaches.

    Nothing is subtracted, so that nothing cancels.

    Args:
        weight: (heads, r, c), w by offset, odd sizes.
        top: (heads, 1, 1), no less than any w, the 0 outside of the window included.
        parts: what is summed, (B, heads, H W, c) each, places in raster order.
        height: H.
        width: W.

    Returns:
        The sums, exp(top) times less than they are.
    """
    # (heads, H W, B c), as products with a matrix (H W, H W) per head want it.
    x = torch.cat([part.permute(1, 2, 0, 3) for part in parts], dim=-1)
    shape, x = x.shape, x.flatten(2)
    # A few more rows cost less than the rows outside by themselves.
    reach = height - 1 if weight.shape[1] + 2 >= height else weight.shape[1] // 2
    table = pad_window(weight, reach, width - 1)
    sums = toeplitz_sums(bounded_exp(table - top).to(x.dtype), x, height, width)
    if reach < height - 1:
        rows = x.unflatten(1, (height, width)).sum(dim=2)
        outside = bounded_exp(-top).to(x.dtype) * (_beyond(height, reach, x) @ rows)
        sums = (sums.unflatten(1, (height, width)) + outside[:, :, None]).flatten(1, 2)
    widths = [part.shape[3] for part in parts]
    return Sums(*(part.permute(2, 0, 1, 3) for part in sums.view(shape).split(widths, dim=-1)))


def convolution(weight: Tensor, top: Tensor, parts: Sums, height: int, width: int) -> Sums:
    """By a depthwise convolution in the window, and two small products for all that lies outside of it.

    As in `toeplitz` nothing is subtracted. Arguments and result as there.
    """
    # Where nothing is outside, the largest weight may be below 0: what nothing is multiplied with must be finite.
    kernel, outside = bounded_exp(weight - top), bounded_exp((-top).clamp_max(0))
    rows, cols = (size // 2 for size in weight.shape[1:])

    def sums_of(x: Tensor) -> Tensor:
        window, other = (per_channel(weights.to(x.dtype), x) for weights in (kernel, outside))
        beyond = _beyond(height, rows, x)
        above_or_below = _along_first(beyond, x.sum(dim=2))[:, :, None]
        near = _along_first(1 - beyond, x.flatten(2)).view_as(x)
        beside = _along_first(_beyond(width, cols, x), near.flatten(0, 1)).view_as(x)
        return depthwise(window, x) + other.flatten() * (above_or_below + beside)

    return Sums(*(from_channels(sums_of(to_channels(part, height, width)), weight.shape[0]) for part in parts))


def _along_first(matrix: Tensor, x: Tensor) -> Tensor:
    """matrix (n, n) times x (B, n, m) for each of B. Other ways to say it ask a graph whether B is 1."""
    return torch.bmm(matrix.expand(x.shape[0], -1, -1), x)


def _beyond(size: int, reach: int, like: Tensor) -> Tensor:
    """1 where two places of a line are further apart than `reach`, else 0: (size, size)."""
    places = torch.arange(size, device=like.device)
    return ((places[:, None] - places).abs() > reach).to(like.dtype)
