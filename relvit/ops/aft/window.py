"""The sums of `aft_conv`: weights exp(w) in a window around each place, one everywhere else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from relvit.ops.aft.depthwise import depthwise
from relvit.ops.aft.exponentials import Sums, bounded_exp, pad_window
from relvit.ops.aft.toeplitz import toeplitz_sums

# Below it `difference` cancels too much. Down to it an average is at most 2 exp(5) = 300 times further off than by
# rounding, and that only where a key of this weight outweighs all others together by as much.
LEAST_DIFFERENCE = -5.0


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

    def sums_of(x: Tensor, kernel: Tensor, outside: Tensor) -> Tensor:
        beyond = _beyond(height, rows, x)
        above_or_below = _along_first(beyond, x.sum(dim=2))[:, :, None]
        near = _along_first(1 - beyond, x.flatten(2)).view_as(x)
        beside = _along_first(_beyond(width, cols, x), near.flatten(0, 1)).view_as(x)
        return depthwise(kernel, x) + outside * (above_or_below + beside)

    return Sums(*(_in_channels(sums_of, part, kernel, outside, height, width) for part in parts))


def difference(weight: Tensor, top: Tensor, parts: Sums, height: int, width: int) -> Sums:
    """By a depthwise convolution with exp(w) - 1, plus the sum over everything: the paper's own way (section 3.2).

    Where exp(w) comes close to 0 at a key that outweighs all others, the two cancel: for weights of `LEAST_DIFFERENCE`
    at least. Arguments and result as `toeplitz`.
    """
    outside = bounded_exp((-top).clamp_max(0))
    kernel = bounded_exp(weight - top) - outside

    def sums_of(x: Tensor, kernel: Tensor, outside: Tensor) -> Tensor:
        return depthwise(kernel, x) + outside * x.sum(dim=(1, 2), keepdim=True)

    return Sums(*(_in_channels(sums_of, part, kernel, outside, height, width) for part in parts))


def _in_channels(
    sums_of: Callable[[Tensor, Tensor, Tensor], Tensor],
    part: Tensor,
    kernel: Tensor,
    outside: Tensor,
    height: int,
    width: int,
) -> Tensor:
    """`sums_of` on (B, H, W, channels), as the tokens lie in memory already, what is per head being per channel."""
    heads, count = part.shape[1], part.shape[3]
    x = part.transpose(1, 2).flatten(2).unflatten(1, (height, width))
    kernel, outside = (weights.to(x.dtype).repeat_interleave(count, 0) for weights in (kernel, outside))
    return sums_of(x, kernel, outside.flatten()).flatten(1, 2).unflatten(-1, (heads, count)).transpose(1, 2)


def _along_first(matrix: Tensor, x: Tensor) -> Tensor:
    """matrix (n, n) times x (B, n, m) for each of B. Other ways to say it ask a graph whether B is 1."""
    return torch.bmm(matrix.expand(x.shape[0], -1, -1), x)


def _beyond(size: int, reach: int, like: Tensor) -> Tensor:
    """1 where two places of a line are further apart than `reach`, else 0: (size, size)."""
    places = torch.arange(size, device=like.device)
    return ((places[:, None] - places).abs() > reach).to(like.dtype)
