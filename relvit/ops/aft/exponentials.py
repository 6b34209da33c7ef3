"""exp(K) V and exp(K) side by side: what all sums of attention-free transformers are over."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.grid import Grid, patch_coords

# How far weights may lie apart, in powers of e. The largest exp(key - m) of a channel is 1, what is below exp(-87) is
# lost in single precision: with a weight of exp(-70) for the one and of 1 for the other, that is less than rounding.
SPREAD = 70.0


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp of what is 0 at most, and counts as -SPREAD where it is less."""
    return exponent.clamp_min(-SPREAD).exp()


def exponentials(key: Tensor, value: Tensor, valid: Tensor | None) -> Tensor:
    """exp(key - m) value and exp(key - m), m being the largest key of a sample and channel, which cancels in averages.

    Args:
        key: (B, heads, N, head_dim) or (B, heads, N, 1).
        value: (B, heads, N, head_dim).
        valid: (1 or B, N), False where a token does not count; whatever it holds, it adds zero.

    Returns:
        (heads, N, B, head_dim + head_dim or 1), contiguous, in float32 at least: as products with matrices (N, N) per
        head want it.
    """
    precision = torch.promote_types(key.dtype, torch.float32)
    key, value = key.to(precision), value.to(precision)
    if valid is None:
        weights = (key - key.detach().amax(dim=2, keepdim=True)).exp()
    else:
        absent = ~valid[:, None, :, None]
        key, value = key.masked_fill(absent, -torch.inf), value.masked_fill(absent, 0.0)
        top = key.detach().amax(dim=2, keepdim=True)
        weights = (key - top.masked_fill(torch.isneginf(top), 0.0)).exp()
    return torch.cat([part.permute(1, 2, 0, 3) for part in (weights * value, weights)], dim=-1)


def average(sums: Tensor, width: int) -> Tensor:
    """From summed `exponentials` (heads, N, B, width + width or 1) averages (B, heads, N, width); zero over none."""
    numerator, denominator = sums.split((width, sums.shape[-1] - width), dim=-1)
    return (numerator / torch.where(denominator == 0, 1.0, denominator)).permute(2, 0, 1, 3)


def to_raster(parts: Tensor, grid: Grid) -> Tensor:
    """Put `exponentials` (heads, prefix + P, B, c) where the tokens lie: (heads, prefix + H W, B, c), the rest 0."""
    if grid.coords is None:
        return parts
    first, patches = parts[:, : grid.prefix], parts[:, grid.prefix :]
    raster = patches.new_zeros(parts.shape[0], grid.height * grid.width, *parts.shape[2:])
    return torch.cat((first, raster.scatter_add(1, _index(grid, patches), patches)), dim=1)


def from_raster(sums: Tensor, grid: Grid) -> Tensor:
    """The inverse of `to_raster` for what the tokens get: (heads, prefix + H W, B, c) -> (heads, prefix + P, B, c)."""
    if grid.coords is None:
        return sums
    first, patches = sums[:, : grid.prefix], sums[:, grid.prefix :]
    shape = patches[:, :1].expand(-1, grid.coords.shape[-2], -1, -1)
    return torch.cat((first, patches.gather(1, _index(grid, shape))), dim=1)


def _index(grid: Grid, like: Tensor) -> Tensor:
    """The number of each patch's place in the raster, as (heads, P, B, c)."""
    coords = patch_coords(grid)
    places = coords[..., 0] * grid.width + coords[..., 1]
    places = (places if places.dim() == 2 else places[None]).transpose(0, 1)
    return places[None, :, :, None].expand(like.shape)


def pad_window(weight: Tensor, rows: int, cols: int) -> Tensor:
    """A window (heads, r, c) of odd sizes with zeros around, or cut, to (heads, 2 rows + 1, 2 cols + 1)."""
    down, right = rows - weight.shape[1] // 2, cols - weight.shape[2] // 2
    return F.pad(weight, (right, right, down, down))
