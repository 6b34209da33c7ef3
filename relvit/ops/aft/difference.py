"""The sums of `aft_conv` as in the paper: a convolution with exp(w) - 1, and the sum over everything."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.ops.aft import depthwise, fourier
from relvit.ops.aft.channels import from_channels, per_channel, to_channels
from relvit.ops.aft.exponentials import Sums, bounded_exp
from relvit.ops.transforms import in_graph, in_transform

# Below it the two cancel too much. Down to it an average is at most 2 exp(5) = 300 times further off than by rounding,
# and that only where a key of this weight outweighs all others together by as much.
LEAST_DIFFERENCE = -5.0
# How far norms of keys and of windows may exceed the smallest denominator, for gradients by transforms: what rounding
# adds to them is then below 1e-4 of what they are sums over. Filters as they are learned reach 10 to 80; with one key
# that outweighs all others, and a window that leaves it out, it can be anything.
MOST_AMPLIFICATION = 100.0
# Transforms pay for windows of so many places at least, on rasters of so many at most, as measured on two cores.
WINDOW_FOR_TRANSFORMS, PLACES_FOR_TRANSFORMS = 81, 4096


def difference(weight: Tensor, top: Tensor, parts: Sums, height: int, width: int) -> Sums:
    """By a depthwise convolution with exp(w) - 1, plus the sum over everything: the paper's own way (section 3.2).

    Where exp(w) comes close to 0 at a key that outweighs all others, the two cancel: for weights of `LEAST_DIFFERENCE`
    at least. Arguments and result as `relvit.ops.aft.window.toeplitz`.
    """
    outside = bounded_exp((-top).clamp_max(0)).to(parts.numerator.dtype)
    kernel = bounded_exp(weight - top).to(parts.numerator.dtype) - outside
    images = [to_channels(part, height, width) for part in parts]
    if images[0].device.type != "cpu" or in_graph() or in_transform() or not torch.is_grad_enabled():
        sums = [_sums(kernel, outside, image) for image in images]
    else:
        sums = _Difference.apply(kernel, outside, *images)
    return Sums(*(from_channels(part, kernel.shape[0]) for part in sums))


def _sums(kernel: Tensor, outside: Tensor, x: Tensor) -> Tensor:
    near = depthwise.depthwise(per_channel(kernel, x), x)
    return near + per_channel(outside, x).flatten() * x.sum(dim=(1, 2), keepdim=True)


class _Difference(torch.autograd.Function):
    """Both sums at once, for the sake of the gradients: they know how large the denominators are."""

    @staticmethod
    def forward(kernel: Tensor, outside: Tensor, numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
        return _sums(kernel, outside, numerator), _sums(kernel, outside, denominator)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernel, outside, *images, whole = ctx.saved_tensors
        if torch.is_grad_enabled():  # these gradients are to be differentiated
            sums = [_sums(kernel, outside, image) for image in images]
            inputs = (kernel, *images)
            of_kernel, *of_images = torch.autograd.grad(sums, inputs, grads, create_graph=True)
            return of_kernel, None, *of_images
        parts = list(zip(images, grads, strict=True))
        # Where a head has a key for each channel, both have the same windows.
        groups = [parts] if images[0].shape == images[1].shape else [[part] for part in parts]
        way = fourier if _transforms_serve(kernel, images[1], whole) else depthwise
        of_kernel, of_images = torch.zeros_like(kernel), []
        for group in groups:
            of_window, found = way.gradients(per_channel(kernel, group[0][0]), *zip(*group, strict=True))
            of_kernel += of_window.unflatten(0, (kernel.shape[0], -1)).sum(dim=1)
            of_images += found
        for of_image, grad in zip(of_images, grads, strict=True):
            of_image += per_channel(outside, grad).flatten() * grad.sum(dim=(1, 2), keepdim=True)
        return of_kernel, None, *of_images


def _transforms_serve(kernel: Tensor, keys: Tensor, whole: Tensor) -> bool:
    """Whether transforms pay, and are exact enough, for the gradients of sums whose denominators are `whole`."""
    samples, *sides = keys.shape[:3]
    if kernel[0].numel() < WINDOW_FOR_TRANSFORMS or math.prod(sides) > PLACES_FOR_TRANSFORMS:
        return False
    if keys.dtype.itemsize < 4 or not samples:
        return False
    keys, whole = (part.flatten(1, 2).unflatten(-1, (kernel.shape[0], -1)) for part in (keys, whole))
    norms = torch.maximum(kernel.flatten(1).norm(dim=1)[:, None], keys.norm(dim=1))
    return bool((norms <= MOST_AMPLIFICATION * whole.amin(dim=1)).all())
