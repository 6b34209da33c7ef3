"""`Position`, the base of relative position modules; functions on any position; `stretch` interpolates tables."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any, ClassVar

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from relvit.ops import Grid, RelativeTerms
from relvit.ops.buckets import bucket, saturation
from relvit.ops.checks import check_kind
from relvit.ops.tracing import is_compiling
from relvit.utils.constants import KeepConstants


class Position(KeepConstants):
    """Base of relative position modules, which compute `RelativeTerms` from the grid of the tokens.

    A position implements `forward(grid)`, or `terms` if the position depends on the tokens. Every block makes its own
    position by the call `position(head_dim, num_heads, device=, dtype=)`, so the constructor must take these arguments,
    even if it ignores them. A position that is not a subclass of `Position` only needs `forward(grid)`.

    A `relvit_*` model initialises linear layers inside of a position as timm does, with a standard deviation of 0.02,
    and calls the position's `init_weights` afterwards. `relvit.retrofit` leaves a new position as its constructor made
    it.

    Examples:
        >>> class Steps(Position):  # a bias of -1 for each row and each column between two patches
        ...     def __init__(self, head_dim, num_heads, device=None, dtype=None):
        ...         super().__init__()
        ...     def forward(self, grid):
        ...         rows, cols = (-torch.arange(1 - size, size).abs().float() for size in (grid.height, grid.width))
        ...         return RelativeTerms(bias=AxisTables(rows, cols))
        >>> Steps(64, 3)(make_grid(4, 6)).bias.cols
        tensor([-5., -4., -3., -2., -1., -0., -1., -2., -3., -4., -5.])
        >>> timm.create_model("relvit_tiny", img_size=64, depth=1, position=Steps)(torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 1000])

    Args:
        init_std: standard deviation of the truncated normal that initialises the parameters (of a small network, only
            the parameters of its last layer). 0: zeros, with which a layer starts as plain attention. None: the
            position has no parameters to initialise.

    Attributes:
        needs_tokens: whether the terms depend on the tokens, or are free channels. If not, the terms are tables that
            the grid alone determines. A subclass that defines a method `terms`, and not this attribute, gets True.
        needs_extent: whether the terms depend on the size of the image or on places in the image, and not on offsets
            alone: `relvit.families.transformer_xl.set_bands` refuses such positions, and so do native batches, unless
            the position needs tokens.
        stretchable: whether the position reads `trained_grid`.
        trained_grid: rows and columns of patches in training. In images of another size, offsets are then divided by
            the ratio of their size to this size, see `relvit.models.set_reach`. None: offsets count patches.

    Raises:
        ValueError: in `init_weights`, `init_std` is negative.
    """

    needs_tokens: ClassVar[bool] = False
    needs_extent: ClassVar[bool] = False
    stretchable: ClassVar[bool] = False
    trained_grid: tuple[int, int] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass of `RelativePosition2d` may override only `terms`. If it inherited `needs_tokens = False`, LSH
        # attention would call the inherited `forward`, and ignore the new `terms`.
        if "terms" in vars(cls) and "needs_tokens" not in vars(cls):
            cls.needs_tokens = True

    def __init__(self, init_std: float | None = None) -> None:
        super().__init__()
        self.init_std = init_std

    def init_weights(self) -> None:
        """Initialise all parameters."""
        super().init_weights()
        if self.init_std is not None:
            initialise(self.parameters(), self.init_std)

    def terms(self, x: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
        """Compute the terms for tokens `x`, (B, N, dim) on `grid`, that attend to the tokens of `key_grid`."""
        return self(covering(grid, key_grid))


def initialise(tables: Iterable[Tensor], std: float) -> None:
    """Fill tables from a normal distribution of standard deviation `std`, truncated at ±2; with zeros if `std` is 0."""
    check_kind("init_std", std, Real, "a number")
    if std < 0:
        raise ValueError(f"init_std must not be negative, got {std}")
    for table in tables:
        # Draw in float32 at least: timm's function turns the lowest uniform number into -2, which in bfloat16 would be
        # drawn for about one entry in 500.
        drawn = torch.zeros_like(table, dtype=torch.promote_types(table.dtype, torch.float32))
        with torch.no_grad():
            table.copy_(trunc_normal_(drawn, std=std) if std else drawn)


def terms_of(position: nn.Module, x: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
    """Compute the terms of a position, whether or not it has the base `Position`: see `Position.terms`.

    Raises:
        ValueError: see `refuse_mixed_sizes`; a position that needs tokens is not refused, because it computes the terms
            of each image from the coordinates of this image's patches.
    """
    if key_grid.valid is not None and needs_extent(position) and not needs_tokens(position):
        refuse_mixed_sizes(position, key_grid)
    return position.terms(x, grid, key_grid) if hasattr(position, "terms") else position(covering(grid, key_grid))


def covering(grid: Grid, key_grid: Grid) -> Grid:
    """Return the grid for which tables hold all offsets: `key_grid`, as high and wide as `grid` if that is larger."""
    if grid is key_grid:
        return key_grid
    return key_grid._replace(height=max(grid.height, key_grid.height), width=max(grid.width, key_grid.width))


def needs_tokens(position: nn.Module) -> bool:
    """Return whether a position depends on tokens or has free channels."""
    if getattr(type(position), "forward", None) is nn.Module.forward:
        # A position without `forward` must have the method `terms`, which takes tokens.
        return True
    return getattr(position, "needs_tokens", hasattr(position, "terms"))


def needs_extent(position: nn.Module) -> bool:
    """Return whether a position, or a position inside of it, depends on the size of the image or on places in it."""
    # Positions that are not modules, as in retrofitted layers of SAM, contain no further positions.
    parts = position.modules() if isinstance(position, nn.Module) else (position,)
    return any(getattr(part, "needs_extent", False) for part in parts)


def refuse_mixed_sizes(position: nn.Module, grid: Grid) -> None:
    """Raise ValueError for a padded batch of images that differ in size, if the terms depend on the size of the image.

    All images of a batch share the tables of a position, so tables can serve images of one size only.
    """
    if grid.valid is not None and grid.coords is not None:
        raise ValueError(
            f"{type(position).__name__} depends on the size of the image, and the images of a padded batch differ in "
            "size: give images of one size as a tensor (B, C, height, width), or take another position"
        )


def is_stretchable(position: nn.Module) -> bool:
    """Return whether a position reads `trained_grid`, see `Position`."""
    return getattr(position, "stretchable", False)


def is_stretched(grid: Grid, trained_grid: tuple[int, int] | None) -> bool:
    """Return whether a position with this `trained_grid` stretches its tables for a grid: not for one of that size.

    Raises:
        ValueError: the grid is of a padded batch: its images differ in size, so no single table serves all images.
    """
    if trained_grid is None:
        return False
    if grid.valid is not None:
        raise ValueError(
            "tables cannot be stretched for a padded batch: give images of one size as a tensor (B, C, height, width), "
            "or use reach 'trained' or 'logn'"
        )
    # A compiled or exported graph must work for all sizes, so it always stretches.
    return is_compiling() or grid.height != trained_grid[0] or grid.width != trained_grid[1]


def axis_offsets(
    grid: Grid, trained_grid: tuple[int, int] | None, max_distance: tuple[int, int] | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return all offsets, key minus query, of rows and of columns: (2 H - 1,) and (2 W - 1,), ascending.

    Args:
        grid, trained_grid: see `is_stretched`, also for the error.
        max_distance: distances, for rows and columns, at which the stretched offsets are clipped; None: no clipping.
        like: a tensor on the device of the result; the result is float64 if `like` is, otherwise float32.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    rows = torch.arange(1 - grid.height, grid.height, device=like.device, dtype=dtype)
    cols = torch.arange(1 - grid.width, grid.width, device=like.device, dtype=dtype)
    if trained_grid is not None and is_stretched(grid, trained_grid):
        rows, cols = rows * trained_grid[0] / grid.height, cols * trained_grid[1] / grid.width
    if max_distance is not None:
        (most_rows, most_cols) = max_distance
        rows, cols = rows.clamp(-most_rows, most_rows), cols.clamp(-most_cols, most_cols)
    return rows, cols


def stretch(table: Tensor, axis: int, size: int, trained: int, bucketing: str) -> Tensor:
    """Interpolate a table so that its row for the offset d equals the trained table at d * trained / size.

    Let f(d) be the trained entry for the offset d, interpolated linearly between whole offsets. Let K be the offset
    from which on all offsets share a row: the clip distance k for 'clip', 4k for 'piecewise'. The new table has the
    entry f(clip(d * trained / size, -K, K)) for |d| <= ceil(K * size / trained). A 'piecewise' table is first expanded
    to one row for each offset from -K to K, so the new table always has the bucketing 'clip'.

    Args:
        table: 2k + 1 rows along `axis`.
        axis: counted from the end, -1 or less.
        size: size of the grid along that axis, in patches; may be a symbolic integer.
        trained: size of the grid along that axis in training.
        bucketing: which row an offset uses; see `relvit.ops.buckets.bucket`.

    Returns:
        The new table, with 2 ceil(K * size / trained) + 1 rows, dtype of `table`; computed in float32 at least.
    """
    distance, dtype = (table.shape[axis] - 1) // 2, table.dtype
    # Convert the table before rows are selected: backward adds up the gradients of all new rows that use a row, and in
    # half precision each addition would round.
    table = table.to(torch.promote_types(dtype, torch.float32))
    if bucketing != "clip":
        far = saturation(distance, bucketing)
        rows = bucket(torch.arange(-far, far + 1, device=table.device), distance, bucketing)
        table, distance = table.index_select(axis, rows), far
    farthest = (distance * size + trained - 1) // trained
    # Count `position` as an integer, in units of 1 / `size`, so that entries for whole offsets are exact.
    offsets = torch.arange(-farthest, farthest + 1, device=table.device)
    position = (offsets * trained + distance * size).clamp(min=0)
    before = position // size
    weight = ((position - before * size).to(table.dtype) / size)[(..., *(None,) * (-1 - axis))]
    low, high = (table.index_select(axis, (before + further).clamp(max=2 * distance)) for further in (0, 1))
    return torch.lerp(low, high, weight).to(dtype)
