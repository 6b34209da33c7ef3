"""Depthwise convolution, and its gradients, by Fourier transforms that are products with small matrices.

Transforms of as few places as images have patches are fastest that way. Rounding errors are relative to the norms of
what is multiplied and lie everywhere, also where the result is small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


def convolve(kernel: Tensor, images: Sequence[Tensor]) -> list[Tensor]:
    """sum_o kernel[o] x[i + o] in every channel, zero beyond the borders.

    Args:
        kernel: (channels, r, c), by offset, odd sizes, at most (2 H - 1, 2 W - 1).
        images: (B, H, W, channels) each.

    Returns:
        For each image what has its shape.
    """
    places, weights, _ = _transforms(kernel, images[0])
    of_x, product = places.spectrum(), places.spectrum()
    found = [image.new_empty(image.shape) for image in images]
    # One sample at a time, in the same memory, stays in the caches.
    for image, sums in zip(images, found, strict=True):
        for x, out in zip(image, sums, strict=True):
            places.inverse(_multiply(places.forward(x, of_x), weights, product, conjugate=True), out)
    return found


def gradients(kernel: Tensor, images: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Of the kernel and of each image, with those of the outputs; arguments as of `convolve`.

    What the kernel's gradient sums over samples and images is summed before the one transform back.
    """
    places, weights, window = _transforms(kernel, images[0])
    of_x, of_grad, product = (places.spectrum() for _ in range(3))
    correlations = places.spectrum().zero_()
    found = [image.new_empty(image.shape) for image in images]
    for parts in zip(images, grads, found, strict=True):
        for x, grad, of_image in zip(*parts, strict=True):
            places.forward(grad, of_grad)
            places.inverse(_multiply(of_grad, weights, product, conjugate=False), of_image)
            correlations += _multiply(places.forward(x, of_x), of_grad, product, conjugate=True)
    of_kernel = kernel.new_empty(*kernel.shape[1:], kernel.shape[0])
    return window.inverse(correlations, of_kernel).permute(2, 0, 1), found


def _transforms(kernel: Tensor, image: Tensor) -> tuple[_Transform, Tensor, _Transform]:
    """Of images, the kernel's spectrum, and of windows."""
    height, width = image.shape[1:3]
    reach = [size // 2 for size in kernel.shape[1:]]
    # So long that what passes one border meets nothing from the other.
    periods = ((height + reach[0]) | 1, width + reach[1])
    window = _Transform(*(range(-size, size + 1) for size in reach), periods, kernel)
    weights = window.forward(kernel.permute(1, 2, 0), window.spectrum())
    return _Transform(range(height), range(width), periods, kernel), weights, window


class _Transform:
    """The transform of images that lie at these rows and columns, zero elsewhere, and its inverse there.

    A spectrum is (m, 2 n, channels): of the n frequencies along columns first all real, then all imaginary parts, for
    each of the m frequencies along rows that are not conjugates of others.
    """

    def __init__(self, rows: range, cols: range, periods: tuple[int, int], like: Tensor) -> None:
        self.rows, self.like = len(rows), like
        self.frequencies, self.waves, self.channels = periods[0] // 2 + 1, 2 * periods[1], like.shape[0]
        self.along_rows, self.back_along_rows = _along_rows(rows, periods[0], like.dtype)
        both, back = _along_cols(cols, periods[1], like.dtype)
        self.along_cols, self.back_along_cols = (matrix.expand(self.frequencies, -1, -1) for matrix in (both, back))
        self.between = like.new_empty(self.frequencies, 2 * len(cols), self.channels)

    def spectrum(self) -> Tensor:
        """Memory for one."""
        return self.like.new_empty(self.frequencies, self.waves, self.channels)

    def forward(self, image: Tensor, out: Tensor) -> Tensor:
        """(rows, cols, channels) to a spectrum."""
        torch.mm(self.along_rows, image.reshape(self.rows, -1), out=self.between.view(2 * self.frequencies, -1))
        return torch.bmm(self.along_cols, self.between, out=out)

    def inverse(self, spectrum: Tensor, out: Tensor) -> Tensor:
        """A spectrum to what its image has at these places, contiguous (rows, cols, channels)."""
        torch.bmm(self.back_along_cols, spectrum, out=self.between)
        torch.mm(self.back_along_rows, self.between.view(2 * self.frequencies, -1), out=out.view(self.rows, -1))
        return out


@cache
def _along_rows(places: range, period: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Places to frequencies, real and imaginary parts in turn, (2 m, places), of an odd period; and back."""
    cosines, sines = _waves(places, period)
    halves = torch.stack((cosines, -sines), dim=1)[: period // 2 + 1]
    # Every frequency but the first stands for its conjugate as well.
    counts = torch.full((period // 2 + 1, 1, 1), 2.0, dtype=torch.float64)
    counts[0] = 1.0
    return halves.flatten(0, 1).to(dtype), (counts * halves / period).flatten(0, 1).T.to(dtype)


@cache
def _along_cols(places: range, period: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Places, first real, then imaginary parts, to frequencies likewise, (2 n, 2 places); and back."""
    cosines, sines = _waves(places, period)
    both = torch.cat((torch.cat((cosines, sines), dim=1), torch.cat((-sines, cosines), dim=1)))
    return both.to(dtype), (both.T / period).to(dtype)


def _waves(places: range, period: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all frequencies at these places, (period, places), in double precision."""
    angles = torch.outer(torch.arange(period), torch.arange(places.start, places.stop)) % period
    angles = angles.to(torch.float64) * (2 * math.pi / period)
    return angles.cos(), angles.sin()


def _multiply(a: Tensor, b: Tensor, out: Tensor, conjugate: bool) -> Tensor:
    """The product of two spectra, of the second one's conjugate if so."""
    size, sign = a.shape[1] // 2, -1.0 if conjugate else 1.0
    (a_real, a_imag), (b_real, b_imag), (real, imag) = (part.split(size, dim=1) for part in (a, b, out))
    torch.mul(a_real, b_real, out=real).addcmul_(a_imag, b_imag, value=-sign)
    torch.mul(a_imag, b_real, out=imag).addcmul_(a_real, b_imag, value=sign)
    return out
