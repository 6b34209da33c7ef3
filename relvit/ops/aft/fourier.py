"""Depthwise convolution, and its gradients, by Fourier transforms that are products with small matrices.

Transforms of as few places as images have patches are fastest that way. Rounding errors are relative to the norms of
what is multiplied and lie everywhere, also where the result is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

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
    found = [image.new_empty(image.shape) for image in images]
    for x, out in _few_at_a_time(places, images, found):
        places.inverse(_multiply(places.forward(x), weights, conjugate=True), out)
    return found


def gradients(kernel: Tensor, images: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Of the kernel and of each image, with those of the outputs; arguments as of `convolve`.

    What the kernel's gradient sums over samples and images is summed before the one transform back.
    """
    places, weights, window = _transforms(kernel, images[0])
    correlations = torch.zeros_like(weights)
    found = [image.new_empty(image.shape) for image in images]
    for x, grad, of_image in _few_at_a_time(places, images, grads, found):
        of_grad = places.forward(grad)
        places.inverse(_multiply(of_grad, weights, conjugate=False), of_image)
        for sample in _multiply(places.forward(x), of_grad, conjugate=True):
            correlations[0] += sample
    of_kernel = kernel.new_empty(1, *kernel.shape[1:], kernel.shape[0])
    return window.inverse(correlations, of_kernel)[0].permute(2, 0, 1), found


def _transforms(kernel: Tensor, image: Tensor) -> tuple[_Transform, Tensor, _Transform]:
    """Of images, the kernel's spectrum, and of windows."""
    height, width = image.shape[1:3]
    reach = [size // 2 for size in kernel.shape[1:]]
    # So long that what passes one border meets nothing from the other.
    periods = ((height + reach[0]) | 1, width + reach[1])
    window = _Transform(*(range(-size, size + 1) for size in reach), periods, kernel.dtype)
    weights = window.forward(kernel.permute(1, 2, 0)[None])
    return _Transform(range(height), range(width), periods, kernel.dtype), weights, window


def _few_at_a_time(places: _Transform, *batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Few samples of all batches at the same place of each list."""
    for parts in zip(*batches, strict=True):
        samples = max(1, SPECTRUM_NUMBERS // (places.numbers * parts[0].shape[-1]))
        yield from zip(*(part.split(samples) for part in parts), strict=True)


class _Transform:
    """The transform of images that lie at these rows and columns, zero elsewhere, and its inverse there.

    A spectrum is (B, m, 2 n, channels): of the n frequencies along columns first all real, then all imaginary parts,
    for each of the m frequencies along rows that are not conjugates of others.
    """

    def __init__(self, rows: range, cols: range, periods: tuple[int, int], dtype: torch.dtype) -> None:
        self.along_rows, self.back_along_rows = _along_rows(rows, periods[0], dtype)
        self.along_cols, self.back_along_cols = _along_cols(cols, periods[1], dtype)
        self.numbers = self.along_rows.shape[0] * self.along_cols.shape[0] // 2

    def forward(self, images: Tensor) -> Tensor:
        """(B, rows, cols, channels) to spectra."""
        found = _along_first(self.along_rows, images.flatten(2))
        found = _along_first(self.along_cols, found.view(-1, self.along_cols.shape[1], images.shape[3]))
        return found.unflatten(0, (images.shape[0], -1))

    def inverse(self, spectra: Tensor, out: Tensor) -> Tensor:
        """Spectra to what their images have at these places, contiguous (B, rows, cols, channels)."""
        found = _along_first(self.back_along_cols, spectra.flatten(0, 1))
        _along_first(
            self.back_along_rows, found.view(spectra.shape[0], self.back_along_rows.shape[1], -1), out.flatten(2)
        )
        return out


def _along_first(matrix: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """matrix (m, n) times x (B, n, c) for each of B."""
    if x.shape[0] == 1:  # faster than a batch of one
        return torch.mm(matrix, x[0], out=None if out is None else out[0])[None]
    return torch.bmm(matrix.expand(x.shape[0], -1, -1), x, out=out)


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


def _multiply(a: Tensor, b: Tensor, conjugate: bool) -> Tensor:
    """The product of spectra, with the conjugate of `b` if so."""
    size, sign = a.shape[2] // 2, -1.0 if conjugate else 1.0
    out = torch.empty_like(a)
    (a_real, a_imag), (b_real, b_imag), (real, imag) = (part.split(size, dim=2) for part in (a, b, out))
    torch.mul(a_real, b_real, out=real).addcmul_(a_imag, b_imag, value=-sign)
    torch.mul(a_imag, b_real, out=imag).addcmul_(a_real, b_imag, value=sign)
    return out
