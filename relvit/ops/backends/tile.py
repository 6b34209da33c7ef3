"""Tiles of queries, for the backend `tiled`: operands and settings, a tile's parts of tensors, products of parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from relvit.ops.backends.pair_logits import Positions
from relvit.ops.grid import Grid


class Operands(NamedTuple):
    """The tensors of all samples and queries, from which tiles are cut; None where a term or mask is absent.

    Keys are on a grid of H x W patches, queries on a grid of H' x W'.
    """

    query: Tensor  # (B, heads, Nq, head_dim)
    key: Tensor  # (B, heads, Nk, head_dim)
    value: Tensor  # (B, heads, Nk, value_dim)
    # (B, heads, Nq, H + W); or, if the `TileConfig` has a `logits_index`, (B, heads, Nq, entries).
    query_logits: Tensor | None
    key_logits: Tensor | None  # (B, heads, Nk, H' + W')
    pair_bias: Tensor | None  # (heads, H + H' - 1, W + W' - 1), see `offset_table`; for tiles the result of `to_slices`
    table: Tensor | None  # the joined value tables, ([heads,] entries, value_dim)
    attn_mask: Tensor | None  # (1 or B, 1 or heads, 1 or Nq, 1 or Nk)


class TileConfig(NamedTuple):
    """Settings that all tiles have in common besides operands; None where a term or padding is absent."""

    grids: tuple[Grid, Grid]  # grids of queries and of keys; with a `pair_bias` neither grid has `coords`
    keys: Positions
    queries: Positions | None  # rows and columns of the queries in `key_logits`
    logits_index: Tensor | None  # (1 or B, 1, Nq, H + W), indices of entries of `query_logits`
    value_index: Tensor | None  # (1 or B, 1, Nq, H + W), indices of entries of the value tables
    valid: Tensor | None  # (1 or B, Nk) booleans, True for keys that may be attended to
    is_causal: bool
    dropout_p: float
    seed: int
    scale: float
    # A tile has at most this number of samples, of heads and of queries. Backward uses the tiles of forward, because
    # the dropout of a tile is seeded by the tile's number.
    size: tuple[int, int, int]
    # This number of threads computes whole heads, see `by_heads`; with 1 the calling thread computes all tiles.
    threads: int


class Tile(NamedTuple):
    """Some samples, heads and queries; all keys."""

    number: int
    samples: slice
    heads: slice
    queries: slice

    def all_tokens(self, tensor: Tensor) -> Tensor:
        """Return the part of the tile's samples and heads of a tensor (1 or B, 1 or heads, ...)."""
        return part_of(part_of(tensor, 0, self.samples), 1, self.heads)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the tile's part of a tensor (1 or B, 1 or heads, 1 or Nq, ...)."""
        return part_of(self.all_tokens(tensor), 2, self.queries)

    def contents(self, query: Tensor, key: Tensor, value: Tensor, *of_queries: Tensor) -> list[Tensor]:
        """Return the tile's queries, keys and values, and further tensors (B, heads, Nq, dim).

        If the tile has several samples, each part is copied to contiguous memory once, so that no product copies it
        again.
        """
        parts = [self.of(query), self.all_tokens(key), self.all_tokens(value), *map(self.of, of_queries)]
        return [part.contiguous() for part in parts] if parts[0].shape[0] > 1 else parts

    def positions(self, of_all: Positions) -> Positions:
        return of_all if of_all.y is None else of_all._replace(y=self.of(of_all.y), x=self.of(of_all.x))

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add this tile's product to the sum over all tiles of the same samples; their first tile sets the sum."""
        if self.queries.start == 0:
            set_product(self.all_tokens(total), left, right)
        else:
            add_product(self.all_tokens(total), left, right, 1.0, 1.0)


def part_of(tensor: Tensor, axis: int, of_axis: slice) -> Tensor:
    """Cut a slice out of an axis, unless the axis is broadcast or no longer than the slice."""
    size = of_axis.stop - of_axis.start
    return tensor if tensor.shape[axis] in (1, size) else tensor.narrow(axis, of_axis.start, size)


def new_tokens(like: Tensor, width: int) -> Tensor:
    """Allocate (B, heads, N, width) with tokens before heads in memory, as in the projections."""
    batch, heads, length, _ = like.shape
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def set_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Set `total` to the product left right; for one sample directly in its memory, whatever its strides."""
    if total.shape[0] == 1:
        torch.bmm(left[0], right[0], out=total[0])
    else:
        total.copy_(torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2]))


def add_product(total: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> None:
    """Set `total` to beta total + alpha left right, in place."""
    total.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1), beta=beta, alpha=alpha)
