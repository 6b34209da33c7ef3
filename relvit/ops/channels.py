"""The channels by which `fused` lengthens vectors: all about them that places decide, whatever the contents."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.buckets import bucket, saturation
from relvit.ops.grid import Grid
from relvit.ops.terms import AxisTables, RelativeTerms
from relvit.ops.transforms import in_graph

# Stock kernels want head widths that are multiples of 8, and are faster for it on the CPU as well.
WIDTH_MULTIPLE = 8

Made = TypeVar("Made")
# Clip distances of a pair of tables, rows and columns.
Distances = tuple[int, int]
# The rows and the columns that indicators tell apart, as (first, number) each.
Places = tuple[tuple[int, int], tuple[int, int]]


class Request(NamedTuple):
    """What decides about the channels besides the grids.

    Each term's clip distances, None without it; the widths of the contents; whether some keys are padding.
    """

    query: Distances | None
    key: Distances | None
    value: Distances | None
    bias: Distances | None
    bucketing: str
    head_dim: int
    value_dim: int
    padded: bool


class Pick(NamedTuple):
    """Which entry of a term's joined table belongs to each token and place.

    Attributes:
        reach: clip distances of the part of the tables that some pair can use.
        index: (1 or B, 1, N, H + W) int64 into `join_tables(tables, reach)`; 0, the zero row, for prefix tokens.
    """

    reach: Distances
    index: Tensor


class Picks(NamedTuple):
    """The picks of each term, None without it; the query term's belongs to the keys, which meet its vectors."""

    query: Pick | None
    key: Pick | None
    value: Pick | None
    bias: Pick | None


class Padding(NamedTuple):
    """One more channel, whose product is 0 for real keys and for padding a logit that softmax turns into zero.

    Attributes:
        on_query: (), the same for all queries.
        on_key: (1 or B, 1, Nk, 1).
        valid: (1 or B, 1, Nk, 1) booleans, False where a key is padding.
    """

    on_query: Tensor
    on_key: Tensor
    valid: Tensor


class Channels(NamedTuple):
    """What is appended, as far as places decide it. Parts that no term needs are None.

    Attributes:
        width: of the longer vectors.
        picks: for each term the table entries that make its logits or meet its marginals.
        key_hot: (1 or B, 1, Nk, H + W), one-hot row and column of each key; zeros for prefix tokens.
        query_hot: (1 or B, 1, Nq, H' + W'), the same of each query, for the query term.
        padding: what hides keys that are padding, None where there are none, or a mask hides them.
    """

    width: int
    picks: Picks
    key_hot: Tensor | None
    query_hot: Tensor | None
    padding: Padding | None


def channels(
    terms: RelativeTerms, grid: Grid, key_grid: Grid, valid: Tensor | None, like: Tensor, value_dim: int
) -> Channels:
    """The channels for queries such as `like` on `grid` and keys on `key_grid`; those of rasters are remembered.

    `valid` is (1 or B, Nk), which keys are not padding, or None where that needs no channel.
    """
    request = _request(terms, like.shape[-1], value_dim, valid is not None)
    made = _once(_make_channels, _remembered_channels, grid, key_grid, request, like)
    if valid is None:
        return made
    # Their product, -1e30, is far below all logits and finite; half precision, multiplied in single, reaches -3.6e9.
    size = 6e4 if like.dtype == torch.float16 else 1e15
    valid = valid[:, None, :, None]
    on_key = torch.where(valid, 0.0, -size).to(like.dtype)
    return made._replace(padding=Padding(like.new_full((), size), on_key, valid))


def picks(terms: RelativeTerms, grid: Grid, key_grid: Grid, like: Tensor) -> Picks:
    """The picks alone, for exactly the rows and columns that there are; those of rasters are remembered."""
    return _once(_make_picks, _remembered_picks, grid, key_grid, _request(terms, 0, 0, False), like)


def _request(terms: RelativeTerms, head_dim: int, value_dim: int, padded: bool) -> Request:
    vectors = (None if tables is None else distances_of(tables) for tables in terms[:3])
    bias = None if terms.bias is None else distances_of(with_width(terms.bias))
    return Request(*vectors, bias, terms.bucketing, head_dim, value_dim, padded)


def _once(
    make: Callable[..., Made], remember: Callable[..., Made], grid: Grid, key_grid: Grid, request: Request, like: Tensor
) -> Made:
    """Make or remember: all blocks of a model ask for the same."""
    shared = key_grid is grid
    grid = grid._replace(valid=None)
    key_grid = grid if shared else key_grid._replace(valid=None)
    makers = (grid, key_grid, request, like.dtype, like.device)
    placed = grid.coords is not None or key_grid.coords is not None
    # Fake tensors and those of a graph belong to where they were made.
    if placed or in_graph() or type(like) is not Tensor:
        return make(*makers)
    # What was made in inference mode cannot be saved for backward elsewhere.
    return remember(*makers, torch.is_inference_mode_enabled())


@lru_cache(maxsize=16)
def _remembered_channels(
    grid: Grid, key_grid: Grid, request: Request, dtype: torch.dtype, device: torch.device, _inference: bool
) -> Channels:
    return _make_channels(grid, key_grid, request, dtype, device)


@lru_cache(maxsize=16)
def _remembered_picks(
    grid: Grid, key_grid: Grid, request: Request, dtype: torch.dtype, device: torch.device, _inference: bool
) -> Picks:
    return _make_picks(grid, key_grid, request, dtype, device)


def _make_channels(grid: Grid, key_grid: Grid, request: Request, dtype: torch.dtype, device: torch.device) -> Channels:
    for_query = request.key is not None or request.bias is not None
    for_key = request.query is not None
    for_value = request.value is not None
    key_places, query_places = all_places(key_grid), places_of_queries(request.query, request.bucketing, grid, key_grid)

    query_width = request.head_dim + (1 if request.padded else 0)
    query_width += count(key_places) if for_query else 0
    query_width += count(query_places) if for_key else 0
    # One width: where value and query differ, PyTorch's CPU kernel falls back to keeping N x N.
    width = max(query_width, request.value_dim + (count(key_places) if for_value else 0))
    # Up to the multiple there are further columns, in which no token lies. Unlike zeros that may be none, they make no
    # case of their own, so that one graph serves all sizes.
    missing = -width % WIDTH_MULTIPLE
    if for_key and not for_query:
        query_places = _with_columns(query_places, missing)
    key_places = _with_columns(key_places, missing)
    return Channels(
        width=width + missing,
        picks=_picks_for(request, grid, key_grid, key_places, query_places, device),
        key_hot=_indicators(key_grid, key_places, dtype, device) if for_query or for_value else None,
        query_hot=_indicators(grid, query_places, dtype, device) if for_key else None,
        padding=None,
    )


def _make_picks(grid: Grid, key_grid: Grid, request: Request, _dtype: torch.dtype, device: torch.device) -> Picks:
    query_places = places_of_queries(request.query, request.bucketing, grid, key_grid)
    return _picks_for(request, grid, key_grid, all_places(key_grid), query_places, device)


def _picks_for(
    request: Request, grid: Grid, key_grid: Grid, key_places: Places, query_places: Places, device: torch.device
) -> Picks:
    def pick(distances: Distances | None, tokens: Grid, places: Places) -> Pick | None:
        return None if distances is None else pick_entries(distances, request.bucketing, tokens, places, device)

    return Picks(
        query=pick(request.query, key_grid, query_places),
        key=pick(request.key, grid, key_places),
        value=pick(request.value, grid, key_places),
        bias=pick(request.bias, grid, key_places),
    )


def all_places(grid: Grid) -> Places:
    """All rows and columns of a grid."""
    return (0, grid.height), (0, grid.width)


def count(places: Places) -> int:
    """Number of channels of indicators."""
    return places[0][1] + places[1][1]


def places_of_queries(distances: Distances | None, bucketing: str, grid: Grid, key_grid: Grid) -> Places:
    """All rows and columns in which queries can lie, as far as keys can tell them apart by tables of these distances.

    Queries with coordinates of their own may lie outside the key grid; further out than the tables reach, all places
    are alike.
    """
    if distances is None or grid.coords is None or grid is key_grid:
        return all_places(grid)
    rows, cols = (saturation(distance, bucketing) for distance in distances)
    return (-rows, key_grid.height + 2 * rows), (-cols, key_grid.width + 2 * cols)


def _with_columns(places: Places, number: int) -> Places:
    rows, (first, cols) = places
    return rows, (first, cols + number)


def distances_of(tables: AxisTables) -> Distances:
    """Clip distances of tables of vectors, ([heads,] 2k + 1, dim) each."""
    return (tables.rows.shape[-2] - 1) // 2, (tables.cols.shape[-2] - 1) // 2


def with_width(tables: AxisTables) -> AxisTables:
    """Tables of scalars as tables of vectors of width 1."""
    return AxisTables(tables.rows[..., None], tables.cols[..., None])


def join_tables(tables: AxisTables, reach: Distances, dtype: torch.dtype) -> Tensor:
    """A zero row, what is in reach of the rows' and of the columns' table, zeros up to a multiple of 8 entries.

    Returns:
        ([heads,] entries, dim).
    """
    middles = [
        table.narrow(-2, distance - near, 2 * near + 1)
        for table, distance, near in zip(tables, distances_of(tables), reach, strict=True)
    ]
    joined = torch.cat(middles, dim=-2)
    return F.pad(joined, (0, 0, 1, -(1 + joined.shape[-2]) % WIDTH_MULTIPLE)).to(dtype)


def pick_entries(distances: Distances, bucketing: str, grid: Grid, places: Places, device: torch.device) -> Pick:
    """The entry of the joined table for each token of `grid` and each row, then each column of `places`."""
    reach = tuple(
        _reach(distance, bucketing, grid, max(size, number))
        for distance, size, (_, number) in zip(distances, (grid.height, grid.width), places, strict=True)
    )
    rows, cols = _lines(places, device)
    y, x = _coordinates(grid, device)
    row_index = bucket(rows - y, reach[0], bucketing) + 1
    col_index = bucket(cols - x, reach[1], bucketing) + (1 + 2 * reach[0] + 1)
    # Prefix tokens use entry 0, the zero row.
    return Pick(reach, F.pad(_side_by_side(row_index, col_index), (0, 0, grid.prefix, 0))[:, None])


def _reach(distance: int, bucketing: str, grid: Grid, size: int) -> int:
    """The largest offset that some pair can have; all of the table's for free coordinates."""
    # A graph for all sizes must not depend on which of them a table outreaches.
    if grid.coords is not None or bucketing != "clip" or in_graph():
        return distance
    return min(distance, size - 1)


def _indicators(grid: Grid, places: Places, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One-hot row, then one-hot column of each token, zero for prefix tokens: (1 or B, 1, N, H + W).

    Tokens beyond the outermost place count as in it. By comparison instead of `one_hot`, which breaks export with
    symbolic sizes.
    """
    rows, cols = _lines(places, device)
    y, x = _coordinates(grid, device)
    if grid.coords is not None:
        y = torch.minimum(torch.maximum(y, rows[:1]), rows[-1:])
        x = torch.minimum(torch.maximum(x, cols[:1]), cols[-1:])
    hot = _side_by_side(y == rows, x == cols).to(dtype)
    return F.pad(hot, (0, 0, grid.prefix, 0))[:, None]


def _lines(places: Places, device: torch.device) -> tuple[Tensor, Tensor]:
    """All rows and all columns, (H,) and (W,) int64."""
    (top, height), (left, width) = places
    return torch.arange(top, top + height, device=device), torch.arange(left, left + width, device=device)


def _coordinates(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows (1, H, 1, 1) and columns (1, 1, W, 1) of a raster, or (B, P, 1, 1) each; together they broadcast."""
    if grid.coords is None:
        rows, cols = _lines(all_places(grid), device)
        return rows[None, :, None, None], cols[None, None, :, None]
    coords = grid.coords if grid.coords.dim() == 3 else grid.coords[None]
    y, x = coords.to(torch.int64)[:, :, None, :].split(1, dim=-1)
    return y, x


def _side_by_side(rows: Tensor, cols: Tensor) -> Tensor:
    """Concatenate what belongs to rows and to columns after broadcasting over the tokens: (1 or B, P, H + W)."""
    shape = torch.broadcast_shapes(rows.shape[:-1], cols.shape[:-1])
    return torch.cat((rows.expand(*shape, -1), cols.expand(*shape, -1)), dim=-1).flatten(1, 2)
