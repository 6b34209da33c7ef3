"""The sums of `aft_conv` as in the paper: a convolution with exp(w) - 1, and the sum over everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.ops.aft import depthwise, fourier
from relvit.ops.aft.channels import from_channels, per_channel, to_channels
from relvit.ops.aft.exponentials import Sums, bounded_exp
from relvit.ops.tracing import is_compiling, is_functorch

# Below it the two cancel too much. Down to it an average is at most 2 exp(5) = 300 times further off than by rounding,
# and that only where a key of this weight outweighs all others together by as much.
LEAST_DIFFERENCE = -5.0
# How far norms of keys and of windows may exceed the smallest denominator, for sums and for gradients by transforms:
# what rounding adds is then below 2e-5 and 1e-4 of what they are averages of, or sums over. Filters as they are learned
# reach 10 to 80; with one key that outweighs all others, and a window that leaves it out, it can be anything.
MOST_IN_SUMS, MOST_IN_GRADIENTS = 30.0, 100.0
# Transforms pay for sums from windows of so many places on, for gradients from so many for each row and column of the
# raster, as measured on two cores.
WINDOW_FOR_SUMS, WINDOW_FOR_GRADIENTS = 625, 1.75


def difference(weight: Tensor, top: Tensor, parts: Sums, height: int, width: int) -> Sums:
    """By a depthwise convolution with exp(w) - 1, plus the sum over everything: the paper's own way (section 3.2).

    Where exp(w) comes close to 0 at a key that outweighs all others, the two cancel: for weights of `LEAST_DIFFERENCE`
    at least. Arguments and result as `relvit.ops.aft.window.toeplitz`.
    """
    outside = bounded_exp((-top).clamp_max(0)).to(parts.numerator.dtype)
    kernel = bounded_exp(weight - top).to(parts.numerator.dtype) - outside
    images = [to_channels(part, height, width) for part in parts]
    if images[0].device.type != "cpu" or is_compiling() or is_functorch():
        sums = [_sums(kernel, outside, image) for image in images]
    else:
        sums = _Difference.apply(kernel, outside, *images)
    return Sums(*(from_channels(part, kernel.shape[0]) for part in sums))


def _sums(kernel: Tensor, outside: Tensor, x: Tensor) -> Tensor:
    return depthwise.depthwise(per_channel(kernel, x), x) + _everything(outside, x)


def _everything(outside: Tensor, x: Tensor) -> Tensor:
    return per_channel(outside, x).flatten() * x.sum(dim=(1, 2), keepdim=True)


class _Difference(torch.autograd.Function):
    """Both sums at once: how large the denominators are says how exact transforms are."""

    @staticmethod
    def forward(kernel: Tensor, outside: Tensor, *images: Tensor) -> tuple[Tensor, ...]:
        if len(images[0]) and kernel[0].numel() >= WINDOW_FOR_SUMS:
            sums = []
            for group in _alike(images):
                sums += fourier.convolve(per_channel(kernel, images[group[0]]), [images[part] for part in group])
            for near, image in zip(sums, images, strict=True):
                near += _everything(outside, image)
            if _within(MOST_IN_SUMS, torch.mul, kernel, images[1], sums[1]):
                return tuple(sums)
        sums = [depthwise.depthwise(per_channel(kernel, image), image) for image in images]
        return tuple(near.add_(_everything(outside, image)) for near, image in zip(sums, images, strict=True))

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
        sides = sum(whole.shape[1:3])
        pays = len(whole) and kernel[0].numel() >= WINDOW_FOR_GRADIENTS * sides
        exact = pays and _within(MOST_IN_GRADIENTS, torch.maximum, kernel, images[1], whole)
        way = fourier if exact else depthwise
        of_kernel, of_images = torch.zeros_like(kernel), []
        for group in _alike(images):
            window = per_channel(kernel, images[group[0]])
            of_window, found = way.gradients(window, *([given[part] for part in group] for given in (images, grads)))
            of_kernel += of_window.unflatten(0, (kernel.shape[0], -1)).sum(dim=1)
            of_images += found
        for of_image, grad in zip(of_images, grads, strict=True):
            of_image += _everything(outside, grad)
        return of_kernel, None, *of_images


def _alike(images: Sequence[Tensor]) -> list[list[int]]:
    """Which of both parts have the same windows: all where a head has a key for each of its channels."""
    return [[0, 1]] if images[0].shape == images[1].shape else [[0], [1]]


def _within(
    limit: float, joined: Callable[[Tensor, Tensor], Tensor], kernel: Tensor, keys: Tensor, whole: Tensor
) -> bool:
    """Whether transforms are exact enough where the denominators are `whole`."""
    if keys.dtype.itemsize < 4:
        return False
    window, keys = (part.square().sum(dim=(1, 2)).sqrt() for part in (kernel, keys))
    keys, smallest = (part.unflatten(-1, (kernel.shape[0], -1)) for part in (keys, whole.amin(dim=(1, 2))))
    return bool((joined(window[:, None], keys) <= limit * smallest).all())
