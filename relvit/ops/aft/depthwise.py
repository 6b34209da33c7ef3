"""Depthwise convolution with large windows, channels last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.tracing import is_compiling, is_functorch


def depthwise(kernel: Tensor, x: Tensor) -> Tensor:
    """sum_o kernel[o] x[i + o] in every channel, zero beyond the borders.

    Args:
        kernel: (channels, r, c), by offset, odd sizes.
        x: (B, H, W, channels).

    Returns:
        (B, H, W, channels).
    """
    if x.device.type != "cpu" or is_compiling() or is_functorch() or not torch.is_grad_enabled():
        return _convolve(kernel, x)
    return _Depthwise.apply(kernel, x)


class _Depthwise(torch.autograd.Function):
    """The gradient of the kernel is a convolution as well, of the images with the gradients of the outputs.

    PyTorch's own takes ten times as long for windows of 15 x 15 on processors, and more on larger images.
    """

    @staticmethod
    def forward(kernel: Tensor, x: Tensor) -> Tensor:
        return _convolve(kernel, x)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        kernel, x = ctx.saved_tensors
        needed = ctx.needs_input_grad
        return _of_kernel(kernel, x, grad) if needed[0] else None, _of_image(kernel, grad) if needed[1] else None


def gradients(kernel: Tensor, images: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Of a kernel and of images, (B, H, W, channels) each, that were convolved with it, with those of the outputs."""
    of_kernels = [_of_kernel(kernel, image, grad) for image, grad in zip(images, grads, strict=True)]
    return torch.stack(of_kernels).sum(dim=0), [_of_image(kernel, grad) for grad in grads]


def _of_image(kernel: Tensor, grad: Tensor) -> Tensor:
    return _convolve(kernel.flip((1, 2)), grad)


def _of_kernel(kernel: Tensor, x: Tensor, grad: Tensor) -> Tensor:
    rows, cols = (size // 2 for size in kernel.shape[1:])
    total = torch.zeros_like(kernel)
    # One sample at a time stays in the caches.
    for image, window in zip(x, grad, strict=True):
        image = F.pad(image, (0, 0, cols, cols, rows, rows)).permute(2, 0, 1)
        total = total + F.conv2d(image, window.permute(2, 0, 1)[:, None], groups=kernel.shape[0])
    return total


def _convolve(kernel: Tensor, x: Tensor) -> Tensor:
    padding = [size // 2 for size in kernel.shape[1:]]
    image = x.permute(0, 3, 1, 2)
    return F.conv2d(image, kernel[:, None], padding=padding, groups=kernel.shape[0]).permute(0, 2, 3, 1)
