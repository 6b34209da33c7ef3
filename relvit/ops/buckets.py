"""Buckets: which row of a table an offset uses, by clipping or on iRPE's piecewise logarithmic scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relvit.utils.messages import check_choice

BUCKETINGS = ("clip", "piecewise")
"""Which row of a table an offset uses, see `bucket`."""


def bucket(offset: Tensor, distance: int, bucketing: str) -> Tensor:
    """Return the row of a table of 2 * `distance` + 1 rows for each offset (integers, any shape).

    'clip': offsets beyond +-`distance` share the outermost rows (Shaw et al. 2018, arXiv 1803.02155, section 3.2).

    'piecewise': each offset up to `distance` / 2 has its own row, larger offsets share rows on a logarithmic scale, and
    all offsets from 4 `distance` on share the outermost row. This is the piecewise index function g of iRPE (Wu et al.
    2021, arXiv 2107.14222), with alpha = `distance` / 2, beta = `distance` and gamma = 4 `distance`.

    With both bucketings, offsets d and -d use rows at the same distance from the middle row.

    Examples:
        >>> bucket(torch.tensor([-9, -1, 0, 3]), 2, "piecewise")
        tensor([0, 1, 2, 4])
    """
    check_choice("bucketing", bucketing, BUCKETINGS)
    if bucketing == "clip" or distance == 0:
        return offset.clamp(-distance, distance) + distance
    alpha, gamma = distance / 2, 4 * distance
    # Single precision would give some offsets a wrong row, so compute in float64: on the CPU if the device is MPS,
    # which has no float64.
    size = (offset.cpu() if offset.device.type == "mps" else offset).abs().to(torch.float64)
    # Clamp offsets below alpha to avoid the logarithm of zero; `torch.where` does not use their logarithms anyway.
    stretched = torch.log(size.clamp(min=alpha) / alpha) * ((distance - alpha) / math.log(gamma / alpha)) + alpha
    far = stretched.round().clamp(max=distance)
    return (torch.where(size <= alpha, size, far).to(offset) * offset.sign()) + distance


def saturation(distance: int, bucketing: str) -> int:
    """Return the offset from which on all offsets of one sign share a row.

    Examples:
        >>> saturation(7, "clip"), saturation(7, "piecewise")
        (7, 28)
    """
    check_choice("bucketing", bucketing, BUCKETINGS)
    return distance if bucketing == "clip" else 4 * distance
