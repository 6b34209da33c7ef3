"""Where every token of a sequence lies in the image."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """The layout of a token sequence: `prefix` tokens without a place, then patch tokens, each at a (row, column).

    It is made once, where the image becomes patches, and handed down block by block. A plain tuple of integers and
    optional tensors, so that it passes through tracing, checkpointing, compilation and export. Build it with
    `make_grid`, which checks its arguments; building it directly checks nothing.

    Attributes:
        height: number of patch rows, H. Key coordinates lie in 0 ... H - 1.
        width: number of patch columns, W.
        prefix: number of leading tokens without a place (class token, registers). Relative terms to, from and
            between them are zero.
        coords: (P, 2) or (B, P, 2) integers, row and column of each patch token; None: all H W patches in raster order.
        valid: (P,) or (B, P) booleans, False for padding, which never receives attention; None: all are real.
            Prefix tokens are always valid.
    """

    height: int
    width: int
    prefix: int = 0
    coords: Tensor | None = None
    valid: Tensor | None = None


def make_grid(
    height: int, width: int, prefix: int = 0, coords: Tensor | None = None, valid: Tensor | None = None
) -> Grid:
    """Build a `Grid` and check it, coordinates against the bounds included (this reads the tensors).

    Args: see `Grid`.

    Raises:
        TypeError: a size that is no integer, coordinates that are not integers, a `valid` that is not boolean.
        ValueError: a size out of range, wrong shapes, coordinates outside the grid.
    """
    for name, size, least in (("height", height, 1), ("width", width, 1), ("prefix", prefix, 0)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an int, got {size!r} of type {type(size).__name__}")
        if size < least:
            raise ValueError(f"{name} must be at least {least}, got {size}")
    if coords is not None:
        if coords.is_floating_point() or coords.is_complex() or coords.dtype == torch.bool:
            raise TypeError(f"coords must hold integers, got dtype {coords.dtype}")
        if coords.dim() not in (2, 3) or coords.shape[-1] != 2:
            raise ValueError(f"coords must have shape (P, 2) or (B, P, 2), got {tuple(coords.shape)}")
        for axis, (name, size) in enumerate((("row", height), ("column", width))):
            line = coords[..., axis]
            if line.numel() and not (int(line.min()) >= 0 and int(line.max()) < size):
                raise ValueError(
                    f"coords hold {name}s from {int(line.min())} to {int(line.max())}, the grid has 0 to {size - 1}"
                )
    grid = Grid(height, width, prefix, coords, valid)
    if valid is not None:
        if valid.dtype != torch.bool:
            raise TypeError(f"valid must be boolean, got dtype {valid.dtype}")
        patches = num_tokens(grid) - prefix
        if valid.dim() not in (1, 2) or valid.shape[-1] != patches:
            raise ValueError(f"valid must have shape ({patches},) or (B, {patches}), got {tuple(valid.shape)}")
    return grid


def num_tokens(grid: Grid) -> int:
    """Length N of the sequence that `grid` lays out, prefix tokens included."""
    patches = grid.height * grid.width if grid.coords is None else grid.coords.shape[-2]
    return grid.prefix + patches


def patch_coords(grid: Grid, device: torch.device | None = None) -> Tensor:
    """Row and column of each patch token, (P, 2) or (B, P, 2) int64, the raster spelled out where `coords` is None."""
    if grid.coords is not None:
        return grid.coords.to(torch.int64)
    rows = torch.arange(grid.height, device=device)[:, None].expand(grid.height, grid.width)
    cols = torch.arange(grid.width, device=device)[None, :].expand(grid.height, grid.width)
    return torch.stack((rows, cols), dim=-1).reshape(-1, 2)


def key_mask(grid: Grid) -> Tensor | None:
    """Which tokens may be attended to, (1 or B, N) booleans with the prefix tokens True; None where all may."""
    if grid.valid is None:
        return None
    valid = grid.valid if grid.valid.dim() == 2 else grid.valid[None]
    return torch.cat((valid.new_ones(valid.shape[0], grid.prefix), valid), dim=1)
