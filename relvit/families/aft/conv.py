"""Window sums of AFT-conv: weights exp(w) in a window around each patch, 1 everywhere else, by depthwise convolution.

There are two backends: 'difference' is the paper's form (section 3.2), which convolves with exp(w) - 1 and adds the sum
over all tokens; 'convolution' convolves with exp(w) and adds the sum over the tokens outside the window.
`operations.aft_conv` chooses.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.families.aft.sums import bounded_exp, per_channel
from relvit.ops.grid import Grid
from relvit.ops.tracing import is_eager

# If a bias w is below this number, the backend 'difference' loses too many digits, because its sum in the window may
# cancel most of the sum over all tokens. If no w is below this number, the error of an average is at most 2 exp(5) =
# 300 times the rounding error.
LEAST_DIFFERENCE = -5.0


def window_sums(parts: Tensor, weight: Tensor, top: Tensor, width: int, grid: Grid, backend: str) -> Tensor:
    """Sum over all tokens j, with weights exp(w_ij) in a window and weights 1 outside of the window.

    Args:
        parts: the terms of the sums, (B, N, channels), as `exponentials` returns them.
        weight: w, (heads, rows, columns) of the window, both odd: one entry for each offset.
        top: (heads, 1, 1), at least the largest w of each head; pairs outside of the window, if there are any, have
            w = 0, so `top` is then at least 0, too.
        width: head_dim.
        grid: layout of the tokens.
        backend: 'difference' or 'convolution'.

    Returns:
        (B, N, channels), the sums. Numerators and denominators of a token and head are multiplied by the same factor,
        such as exp(-top), which cancels in their quotient.
    """
    height, columns, coords = grid.height, grid.width, grid.coords
    if backend == "difference":
        # The two sums mostly cancel, so bfloat16, which `parts` may have on GPUs, would leave hardly any digits.
        parts = parts.to(torch.promote_types(parts.dtype, torch.float32))
    # If the window covers all patches, no pair is outside of it, so `top` may be far below 0, and exp(-top) would
    # overflow: clamp -top to at most 0.
    window, outside = bounded_exp(weight - top), bounded_exp((-top).clamp_max(0))
    window, outside = (per_channel(part.to(parts.dtype), parts.shape[2], width) for part in (window, outside))
    outside = outside.flatten()
    first, image = parts[:, : grid.prefix], parts[:, grid.prefix :]
    index = None
    if coords is not None:
        places = (coords[..., 0] * columns + coords[..., 1]).to(torch.int64)
        index = places[..., None].expand(image.shape)
        image = image.new_zeros(image.shape[0], height * columns, image.shape[2]).scatter_add(1, index, image)
    image = image.unflatten(1, (height, columns))
    if backend == "difference":
        everywhere = image.sum(dim=(1, 2), keepdim=True)
        sums = depthwise(window - outside[:, None, None], image) + outside * everywhere
    else:
        sums = depthwise(window, image) + outside * _outside_sums(image, *weight.shape[1:])
    sums = sums.flatten(1, 2)
    if index is not None:
        sums = sums.gather(1, index)
    if grid.prefix == 0:
        return sums
    everything = parts.sum(dim=1, keepdim=True).expand(-1, grid.prefix, -1)
    return torch.cat((everything, sums + outside * first.sum(dim=1, keepdim=True)), dim=1)


def _outside_sums(image: Tensor, rows: int, cols: int) -> Tensor:
    """Sum (B, H, W, channels) over all patches in rows outside of a window, and over all patches beside the window."""
    above_or_below, beside = _apart(image.shape[1], rows // 2, image), _apart(image.shape[2], cols // 2, image)
    far = _along_first(above_or_below, image.sum(dim=2))[:, :, None]
    near = _along_first(1 - above_or_below, image.flatten(2)).view_as(image)
    return far + _along_first(beside, near.flatten(0, 1)).view_as(image)


def _along_first(matrix: Tensor, x: Tensor) -> Tensor:
    """Multiply a square matrix by B matrices x, in a graph for all B; a graph of `matrix @ x` knows whether B is 1."""
    return torch.bmm(matrix.expand(x.shape[0], -1, -1), x)


def _apart(size: int, reach: int, like: Tensor) -> Tensor:
    """Return 1 where two rows (or columns) are further apart than `reach`, else 0: (size, size)."""
    index = torch.arange(size, device=like.device)
    return ((index[:, None] - index).abs() > reach).to(like.dtype)


def depthwise(kernel: Tensor, x: Tensor) -> Tensor:
    """Compute sum_o kernel[o] x[i + o] in every channel, zero beyond the borders.

    Args:
        kernel: (channels, rows, columns) of the window, both odd: one entry for each offset o.
        x: (B, H, W, channels).
    """
    if x.device.type == "cpu" and torch.is_grad_enabled() and is_eager():
        return _Depthwise.apply(kernel, x)
    return _convolve(kernel, x)


class _Depthwise(torch.autograd.Function):
    """Depthwise convolution that also computes the kernel's gradient by a convolution.

    For large depthwise kernels on CPUs, PyTorch's gradient of the kernel takes many times as long as this convolution.
    """

    @staticmethod
    def forward(kernel: Tensor, x: Tensor) -> Tensor:
        return _convolve(kernel, x)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        kernel, x = ctx.saved_tensors
        of_x = _convolve(kernel.flip((1, 2)), grad) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, of_x
        rows, cols = (size // 2 for size in kernel.shape[1:])
        of_kernel = torch.zeros_like(kernel)
        # Compute one sample at a time, because a single sample fits into the CPU's caches. Put channels first in
        # memory, because the convolution is then faster.
        for image, of_output in zip(x, grad, strict=True):
            image = F.pad(image.permute(2, 0, 1).contiguous(), (cols, cols, rows, rows))
            of_output = of_output.permute(2, 0, 1)[:, None].contiguous()
            of_kernel = of_kernel + F.conv2d(image, of_output, groups=kernel.shape[0])
        return of_kernel, of_x


def _convolve(kernel: Tensor, x: Tensor) -> Tensor:
    padding = [size // 2 for size in kernel.shape[1:]]
    image = x.permute(0, 3, 1, 2)
    return F.conv2d(image, kernel[:, None], padding=padding, groups=kernel.shape[0]).permute(0, 2, 3, 1)
