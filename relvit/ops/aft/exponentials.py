"""exp(K) V and exp(K): what all sums of attention-free transformers are over."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.ops.grid import Grid, patch_coords
from relvit.ops.tracing import is_compiling, is_functorch

# How far weights may lie apart, in powers of e. The largest exp(key - m) of a channel is 1, what is below exp(-87) is
# lost in single precision: with a weight of exp(-70) for the one and of 1 for the other, that is less than rounding.
SPREAD = 70.0
# Devices that multiply matrices much faster in half precision.
HALF_PRODUCTS = {"cuda"}


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp of what is 0 at most, and counts as -SPREAD where it is less."""
    return exponent.clamp_min(-SPREAD).exp()


class Sums(NamedTuple):
    """What is summed, and its sums: exp(key) value and exp(key), both up to a factor for each query.

    Attributes:
        numerator: (B, heads, N, head_dim).
        denominator: (B, heads, N, head_dim), or (B, heads, N, 1) where a head's channels share their keys.
    """

    numerator: Tensor
    denominator: Tensor


def exponentials(key: Tensor, value: Tensor, valid: Tensor | None) -> Sums:
    """exp(key - m) value and exp(key - m), m being the largest key of a sample and channel, which cancels in averages.

    Args:
        key: (B, heads, N, head_dim) or (B, heads, N, 1).
        value: (B, heads, N, head_dim).
        valid: (1 or B, N), False where a token does not count; whatever it holds, it adds zero.

    Returns:
        Both in float32 at least.
    """
    precision = torch.promote_types(key.dtype, torch.float32)
    key, value = key.to(precision), value.to(precision)
    if valid is None:
        top = key.detach().amax(dim=2, keepdim=True)
    else:
        absent = ~valid[:, None, :, None]
        key, value = key.masked_fill(absent, -torch.inf), value.masked_fill(absent, 0.0)
        top = key.detach().amax(dim=2, keepdim=True)
        top = top.masked_fill(torch.isneginf(top), 0.0)
    if is_compiling() or is_functorch():
        weights = (key - top).exp()
        return Sums(weights * value, weights)
    return Sums(*_Exponentials.apply(key, value, top))


class _Exponentials(torch.autograd.Function):
    """The gradients in fewer passes over memory than autograd's own."""

    @staticmethod
    def forward(key: Tensor, value: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        weights = (key - top).exp_()
        return weights * value, weights

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[1], output[1])

    @staticmethod
    def backward(ctx: FunctionCtx, of_numerator: Tensor, of_denominator: Tensor) -> tuple[Tensor | None, ...]:
        value, weights = ctx.saved_tensors
        of_key = (of_numerator * value).sum_to_size(weights.shape).add_(of_denominator).mul_(weights)
        return of_key, of_numerator * weights, None


def for_products(parts: Sums, dtype: torch.dtype) -> Sums:
    """As matrices are multiplied best: on GPUs in bfloat16 where the contents had this `dtype`, as in attention.

    It has the range of float32, which float16 does not have: there small exponentials would be lost.
    """
    if dtype != torch.bfloat16 or parts.numerator.device.type not in HALF_PRODUCTS:
        return parts
    return Sums(*(part.to(dtype) for part in parts))


def to_raster(parts: Sums, grid: Grid) -> Sums:
    """Put (B, heads, prefix + P, c) where the tokens lie: (B, heads, prefix + H W, c), zero elsewhere."""
    if grid.coords is None:
        return parts
    return Sums(*(_to_raster(part, grid) for part in parts))


def _to_raster(part: Tensor, grid: Grid) -> Tensor:
    first, patches = part[:, :, : grid.prefix], part[:, :, grid.prefix :]
    raster = patches.new_zeros(*part.shape[:2], grid.height * grid.width, part.shape[3])
    return torch.cat((first, raster.scatter_add(2, _index(grid, patches), patches)), dim=2)


def from_raster(sums: Sums, grid: Grid) -> Sums:
    """The inverse of `to_raster`, for what the tokens get."""
    if grid.coords is None:
        return sums
    return Sums(*(_from_raster(part, grid) for part in sums))


def _from_raster(part: Tensor, grid: Grid) -> Tensor:
    first, patches = part[:, :, : grid.prefix], part[:, :, grid.prefix :]
    shape = patches[:, :, :1].expand(-1, -1, grid.coords.shape[-2], -1)
    return torch.cat((first, patches.gather(2, _index(grid, shape))), dim=2)


def _index(grid: Grid, like: Tensor) -> Tensor:
    """The number of each patch's place in the raster, as (B, heads, P, c)."""
    coords = patch_coords(grid)
    places = coords[..., 0] * grid.width + coords[..., 1]
    places = places if places.dim() == 2 else places[None]
    return places[:, None, :, None].expand(like.shape)


def pad_window(weight: Tensor, rows: int, cols: int) -> Tensor:
    """A window (heads, r, c) of odd sizes with zeros around, or cut, to (heads, 2 rows + 1, 2 cols + 1)."""
    down, right = rows - weight.shape[1] // 2, cols - weight.shape[2] // 2
    return F.pad(weight, (right, right, down, down))
