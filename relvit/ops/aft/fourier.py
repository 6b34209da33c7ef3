"""Depthwise convolution, and its gradients, by Fourier transforms that are products with small matrices.

Transforms of as few places as images have patches are fastest that way. Rounding errors are relative to the norms of
what is multiplied and lie everywhere, also where the result is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# How many numbers of spectra are formed at a time: what stays in the caches.
SPECTRUM_NUMBERS = 2**18


def convolve(kernel: Tensor, images: Sequence[Tensor]) -> list[Tensor]:
    """sum_o kernel[o] x[i + o] in every channel, zero beyond the borders.

    Args:
        kernel: (channels, r, c), by offset, odd sizes, at most (2 H - 1, 2 W - 1).
        images: (B, H, W, channels) each.

    Returns:
        For each image what has its shape.
    """
    places, weights, _ = _transforms(kernel, images[0])
    of_x, product = places.spectra(), places.spectra()
    found = [image.new_empty(image.shape) for image in images]
    for x, out in places.few_at_a_time(images, found):
        places.inverse(_multiply(places.forward(x, of_x), weights, product, conjugate=True), out)
    return found


def gradients(kernel: Tensor, images: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Of the kernel and of each image, with those of the outputs; arguments as of `convolve`.

    What the kernel's gradient sums over samples and images is summed before the one transform back.
    """
    places, weights, window = _transforms(kernel, images[0])
    of_x, of_grad, product, sums = (places.spectra() for _ in range(4))
    sums.numbers.zero_()
    found = [image.new_empty(image.shape) for image in images]
    for x, grad, of_image in places.few_at_a_time(images, grads, found):
        places.forward(grad, of_grad)
        places.inverse(_multiply(of_grad, weights, product, conjugate=False), of_image)
        places.forward(x, of_x)
        sums.real.addcmul_(of_x.real, of_grad.real).addcmul_(of_x.imag, of_grad.imag)
        sums.imag.addcmul_(of_x.imag, of_grad.real).addcmul_(of_x.real, of_grad.imag, value=-1.0)
    total = window.spectra()
    for part, parts in ((total.real, sums.real), (total.imag, sums.imag)):
        torch.sum(parts, dim=0, keepdim=True, out=part)
    of_kernel = kernel.new_empty(1, *kernel.shape[1:], kernel.shape[0])
    window.inverse(total, of_kernel)
    return of_kernel[0].permute(2, 0, 1), found


def _transforms(kernel: Tensor, image: Tensor) -> tuple[_Transform, _Spectra, _Transform]:
    """Of images, the kernel's spectrum, and of windows."""
    batch, height, width, channels = image.shape
    reach = [size // 2 for size in kernel.shape[1:]]
    # So long that what passes one border meets nothing from the other.
    periods = ((height + reach[0]) | 1, width + reach[1])
    most = max(1, SPECTRUM_NUMBERS // (math.prod(periods) * channels))
    samples = max(count for count in range(1, most + 1) if batch % count == 0)
    window = _Transform(*(range(-size, size + 1) for size in reach), periods, 1, kernel)
    weights = window.forward(kernel.permute(1, 2, 0)[None], window.spectra())
    return _Transform(range(height), range(width), periods, samples, kernel), weights, window


class _Spectra(NamedTuple):
    """Of the n frequencies along columns first all real, then all imaginary parts, for each sample and for each of the
    m frequencies along rows that are not conjugates of others: (B m, 2 n, channels); and views (B, m, n, channels).
    """

    numbers: Tensor
    real: Tensor
    imag: Tensor


class _Transform:
    """The transform of a few images that lie at these rows and columns, zero elsewhere, and its inverse there.

    All in the same memory, which stays in the caches.
    """

    def __init__(self, rows: range, cols: range, periods: tuple[int, int], samples: int, like: Tensor) -> None:
        self.like, self.samples, self.channels = like, samples, like.shape[0]
        self.along_rows, self.back_along_rows = _along_rows(rows, periods[0], like.dtype)
        self.along_cols, self.back_along_cols = _along_cols(cols, periods[1], like.dtype)
        self.frequencies = self.along_rows.shape[0] // 2
        self.between = like.new_empty(samples * self.frequencies, self.along_cols.shape[1], self.channels)
        self.between_rows = self.between.view(samples, 2 * self.frequencies, -1)

    def spectra(self) -> _Spectra:
        """Memory for those of all samples."""
        numbers = self.like.new_empty(self.samples * self.frequencies, self.along_cols.shape[0], self.channels)
        return _Spectra(numbers, *numbers.unflatten(0, (self.samples, -1)).chunk(2, dim=2))

    def forward(self, images: Tensor, out: _Spectra) -> _Spectra:
        """(samples, rows, cols, channels) to spectra."""
        _along_first(self.along_rows, images.flatten(2), self.between_rows)
        _along_first(self.along_cols, self.between, out.numbers)
        return out

    def inverse(self, spectra: _Spectra, out: Tensor) -> None:
        """Spectra to what their images have at these places, contiguous (samples, rows, cols, channels)."""
        _along_first(self.back_along_cols, spectra.numbers, self.between)
        _along_first(self.back_along_rows, self.between_rows, out.flatten(2))

    def few_at_a_time(self, *batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """As many samples as it takes, of all batches at the same place of each list."""
        for parts in zip(*batches, strict=True):
            yield from zip(*(part.split(self.samples) for part in parts), strict=True)


def _along_first(matrix: Tensor, x: Tensor, out: Tensor) -> None:
    """matrix (m, n) times x (B, n, c) for each of B."""
    if x.shape[0] == 1:  # faster than a batch of one
        torch.mm(matrix, x[0], out=out[0])
    else:
        torch.bmm(matrix.expand(x.shape[0], -1, -1), x, out=out)


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


def _multiply(a: _Spectra, b: _Spectra, out: _Spectra, conjugate: bool) -> _Spectra:
    """The product, with the conjugate of `b` if so."""
    sign = -1.0 if conjugate else 1.0
    torch.mul(a.real, b.real, out=out.real).addcmul_(a.imag, b.imag, value=-sign)
    torch.mul(a.imag, b.real, out=out.imag).addcmul_(a.real, b.imag, value=sign)
    return out
