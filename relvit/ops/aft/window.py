"""The sums of `aft_conv`: weights exp(w) in a window around each place, one everywhere else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.aft.exponentials import bounded_exp, pad_window
from relvit.ops.aft.toeplitz import toeplitz_sums

# In powers of e. The smallest sum is so much smaller than the largest: exp(20) times the rounding of double precision
# is that of single precision.
FOURIER_SPREAD = 20.0


def toeplitz(weight: Tensor, top: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    """By products with Toeplitz matrices: of the whole raster, or row by row of the rows that the window reaches.

    Nothing is subtracted, so that nothing cancels.

    Args:
        weight: (heads, r, c), w by offset, odd sizes.
        top: (heads, 1, 1), no less than any w, the 0 outside of the window included.
        x: (heads, H W, n), what is summed, places in raster order.
        height: H.
        width: W.

    Returns:
        (heads, H W, n), exp(top) times less than the sums.
    """
    # A few more rows cost less than the rows outside by themselves.
    reach = height - 1 if weight.shape[1] + 2 >= height else weight.shape[1] // 2
    table = pad_window(weight, reach, width - 1)
    sums = toeplitz_sums(bounded_exp(table - top).to(x.dtype), x, height, width)
    if reach == height - 1:
        return sums
    rows = x.unflatten(1, (height, width)).sum(dim=2)
    outside = bounded_exp(-top).to(x.dtype) * (_beyond(height, reach, x) @ rows)
    return (sums.unflatten(1, (height, width)) + outside[:, :, None]).flatten(1, 2)


def convolution(weight: Tensor, top: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    """By a depthwise convolution in the window, and two small products for all that lies outside of it.

    The paper convolves with exp(w) - 1 and adds the sum over everything (section 3.2): that cancels where exp(w) comes
    close to 0 at a key that outweighs all others. Here nothing is subtracted. Arguments and result as `toeplitz`.
    """
    kernel = bounded_exp(weight - top).to(x.dtype)
    image = x.permute(2, 0, 1).unflatten(2, (height, width))
    reach = [size // 2 for size in weight.shape[1:]]
    inside = F.conv2d(image, kernel[:, None], padding=reach, groups=weight.shape[0]).permute(1, 2, 3, 0)

    x = x.unflatten(1, (height, width))
    above_or_below = (_beyond(height, reach[0], x) @ x.sum(dim=2))[:, :, None]
    beside = torch.einsum("Xx,hyxn->hyXn", _beyond(width, reach[1], x), x)
    beside = torch.einsum("Yy,hyxn->hYxn", 1 - _beyond(height, reach[0], x), beside)
    return (inside + bounded_exp(-top).to(x.dtype)[..., None] * (above_or_below + beside)).flatten(1, 2)


def fourier(weight: Tensor, top: Tensor, x: Tensor, height: int, width: int) -> Tensor:
    """By fast Fourier transforms of exp(w) - 1, plus the sum over everything, as the paper has it.

    Rounding is relative to the largest sum, not to each one: in double precision, and for weights that lie no further
    apart than `FOURIER_SPREAD`. Arguments and result as `toeplitz`.
    """
    dtype, x = x.dtype, x.double()
    weight, top = weight.double(), top.double()
    rows, cols = (min(size // 2, extent - 1) for size, extent in zip(weight.shape[1:], (height, width), strict=True))
    outside = bounded_exp(-top)
    kernel = bounded_exp(pad_window(weight, rows, cols) - top) - outside
    size = (height + rows, width + cols)
    # Offset 0 comes first, offsets below 0 last.
    kernel = F.pad(kernel, (0, size[1] - kernel.shape[2], 0, size[0] - kernel.shape[1])).roll((-rows, -cols), (1, 2))
    spectrum = torch.fft.rfft2(kernel).conj()
    image = x.transpose(1, 2).unflatten(2, (height, width))
    near = torch.fft.irfft2(torch.fft.rfft2(image, s=size) * spectrum[:, None], s=size)[..., :height, :width]
    total = outside * x.sum(dim=1, keepdim=True)
    return (near.flatten(2).transpose(1, 2) + total).to(dtype)


def _beyond(size: int, reach: int, like: Tensor) -> Tensor:
    """1 where two places of a line are further apart than `reach`, else 0: (size, size)."""
    places = torch.arange(size, device=like.device)
    return ((places[:, None] - places).abs() > reach).to(like.dtype)
