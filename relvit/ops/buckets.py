"""Buckets: which row of a table an offset uses, by clipping or on iRPE's piecewise logarithmic scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BUCKETINGS = ("clip", "piecewise")
"""Which row of a table an offset uses, see `bucket`."""


def bucket(offset: Tensor, distance: int, bucketing: str) -> Tensor:
    """Return the row of a table of 2 * `distance` + 1 rows for each offset (integers, any shape).

    'clip': offsets beyond +-`distance` share the outermost rows (Shaw et al. 2018, arXiv 1803.02155, eq. 4).

    'piecewise': offsets up to alpha have rows of their own, further ones share rows on a logarithmic scale, up to
    gamma, with alpha : beta : gamma = 1 : 2 : 8 and beta = `distance` (iRPE, Wu et al. 2021, arXiv 2107.14222, the
    piecewise index function g). Both are odd functions of the offset.
    """
    if bucketing == "clip" or distance == 0:
        return offset.clamp(-distance, distance) + distance
    alpha, gamma = distance / 2, 4 * distance
    # Single precision would round some offsets to another row, and MPS has no float64.
    size = (offset.cpu() if offset.device.type == "mps" else offset).abs().to(torch.float64)
    # Near offsets are clamped, because their logarithm, which is not used, must be finite.
    stretched = torch.log(size.clamp(min=alpha) / alpha) * ((distance - alpha) / math.log(gamma / alpha)) + alpha
    far = stretched.round().clamp(max=distance)
    return (torch.where(size <= alpha, size, far).to(offset) * offset.sign()) + distance


def saturation(distance: int, bucketing: str) -> int:
    """Return the offset from which on all offsets of one sign share a row."""
    return distance if bucketing == "clip" else 4 * distance
