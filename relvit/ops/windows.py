"""Windows: cut the tokens of a grid into windows for attention, and join them again; test if a grid exceeds one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from relvit.ops.checks import check_kind, has_shape, int_pair
from relvit.ops.grid import Grid, num_tokens


class Division(NamedTuple):
    """Windows over a grid, each pair as (rows, columns)."""

    size: tuple[int, int]  # numbers of patches in one window
    before: tuple[int, int]  # how far the first windows extend beyond the top and the left border, in patches
    after: tuple[int, int]  # how far the last windows extend beyond the bottom and right border, in patches
    number: tuple[int, int]  # numbers of windows along the vertical and along the horizontal axis


def to_windows(x: Tensor, grid: Grid, size: int | Sequence[int], shift: int | Sequence[int] = 0) -> tuple[Tensor, Grid]:
    """Cut tokens on a grid into windows, each of which becomes a sequence.

    Windows begin at rows shift, shift + size, shift + 2 size ... and likewise at columns; the patches before the first
    of these windows are in further windows, which extend beyond the border. Attention in these windows equals Swin's
    attention with the cyclic shift and its mask (Liu et al. 2021, arXiv 2103.14030, section 3.2): Swin's shift brings
    opposite parts of the image together in one window, and the mask separates them; here such parts are in different
    windows.

    Examples:
        >>> tokens, grid = torch.randn(2, 5 * 7, 8), make_grid(5, 7)
        >>> windows, window_grid = to_windows(tokens, grid, size=4)  # 2 x 2 windows cover each image
        >>> windows.shape
        torch.Size([8, 16, 8])
        >>> torch.equal(from_windows(windows, grid, size=4), tokens)
        True

    Args:
        x: (B, H W, C) tokens, all patches of the grid in raster order, without prefix tokens.
        grid: where the tokens are; its `valid` is cut in the same way.
        size: size of the windows in patches, for both axes or (rows, columns).
        shift: where the first full window begins, less than `size`, for both axes or (rows, columns).

    Returns:
        (B n, rows columns, C) for n windows in each image: the windows of one image after the other, windows and their
        tokens in raster order; and the `Grid` of these windows. Places beyond the border hold zeros and are not valid.
        The new grid's `valid` is (B n, rows columns), or None if `grid` has no `valid` and no window extends beyond the
        border.

    Raises:
        ValueError: the grid has prefix tokens or coordinates, or `x` or `valid` does not have one token for each patch
            of the grid.
        ValueError: `size` is below 1, or `shift` is below 0 or not less than `size`.
        TypeError: `size` or `shift` does not hold integers, or the arguments have another order.
    """
    division = _divide(grid, size, shift)
    check_kind("x", x, Tensor, "a tensor")
    if x.dim() != 3 or x.shape[1] != num_tokens(grid):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, expected (B, {num_tokens(grid)}, C): "
            f"grid has {grid.height} x {grid.width} patches"
        )
    valid = grid.valid
    if valid is None and any((*division.before, *division.after)):
        valid = torch.ones(num_tokens(grid), dtype=torch.bool, device=x.device)
    if valid is not None:
        if not has_shape(valid, (x.shape[1],), (1, x.shape[1]), (x.shape[0], x.shape[1])):
            raise ValueError(
                f"grid.valid has shape {tuple(valid.shape)}, expected ({x.shape[1]},) or {tuple(x.shape[:2])}"
            )
        valid = _cut(valid.expand(x.shape[0], -1)[..., None], grid, division)[..., 0]
    return _cut(x, grid, division), Grid(*division.size, valid=valid)


def from_windows(windows: Tensor, grid: Grid, size: int | Sequence[int], shift: int | Sequence[int] = 0) -> Tensor:
    """Join windows, the inverse of `to_windows`, without the places beyond the border.

    Examples:
        >>> tokens, grid = torch.randn(1, 6, 8), make_grid(2, 3)
        >>> torch.equal(from_windows(to_windows(tokens, grid, size=2)[0], grid, size=2), tokens)
        True

    Args:
        windows: (B n, rows columns, C), n windows of each image, as `to_windows` returns them.
        grid, size, shift: as given to `to_windows`.

    Returns:
        (B, H W, C) tokens in raster order.

    Raises: see `to_windows`.
    """
    division = _divide(grid, size, shift)
    check_kind("windows", windows, Tensor, "a tensor")
    (rows, cols), (down, across) = division.size, division.number
    if windows.dim() != 3 or windows.shape[0] % (down * across) != 0 or windows.shape[1] != rows * cols:
        raise ValueError(
            f"windows has shape {tuple(windows.shape)}, expected (B * {down * across}, {rows * cols}, C): "
            f"{down} x {across} windows of {rows} x {cols} patches"
        )
    pattern = "(b down across) (rows cols) c -> b (down rows) (across cols) c"
    x = rearrange(windows, pattern, down=down, across=across, rows=rows, cols=cols)
    top, left = division.before
    return x[:, top : top + grid.height, left : left + grid.width].flatten(1, 2)


def exceeds_window(grid: Grid, window: tuple[int, int] | None, attn_mask: Tensor | None, is_causal: bool) -> bool:
    """Return whether a grid is larger than the window, (rows, columns), within which tokens attend; None: no window.

    Raises:
        ValueError: the grid is larger than the window, and has `coords`, or `attn_mask` or `is_causal` is given.
    """
    if window is None or (grid.height <= window[0] and grid.width <= window[1]):
        return False
    if attn_mask is not None or is_causal:
        raise ValueError("attention in windows takes no attn_mask and is not causal: leave attn_mask and is_causal out")
    if grid.coords is not None:
        raise ValueError(
            "attention in windows needs all patches of images of one size: give no native batch, no keep and no "
            "patch_drop_rate, or call set_reach(model, 'trained') first"
        )
    return True


def _divide(grid: Grid, size: int | Sequence[int], shift: int | Sequence[int]) -> Division:
    check_kind("grid", grid, Grid, "a Grid, after the tokens (tokens, grid, size, shift)")
    size, shift = int_pair("size", size, 1), int_pair("shift", shift, 0)
    if any(start >= length for start, length in zip(shift, size, strict=True)):
        raise ValueError(f"shift must be less than size, got shift {shift} with size {size}")
    if grid.prefix:
        raise ValueError(
            f"grid has prefix tokens ({grid.prefix}), which belong to no window: keep them out of tokens and grid"
        )
    if grid.coords is not None:
        raise ValueError("grid has coords, windows need all patches in raster order: mask dropped ones with grid.valid")
    axes = []
    for patches, length, start in zip((grid.height, grid.width), size, shift, strict=True):
        before = (length - start) % length
        after = -(before + patches) % length
        axes.append((length, before, after, (before + patches + after) // length))
    return Division(*zip(*axes, strict=True))


def _cut(x: Tensor, grid: Grid, division: Division) -> Tensor:
    """Cut (B, H W, C) into n windows of each image, (B n, rows columns, C), with zeros beyond the border."""
    (top, left), (bottom, right) = division.before, division.after
    x = F.pad(x.unflatten(1, (grid.height, grid.width)), (0, 0, left, right, top, bottom))
    rows, cols = division.size
    return rearrange(x, "b (down rows) (across cols) c -> (b down across) (rows cols) c", rows=rows, cols=cols)
