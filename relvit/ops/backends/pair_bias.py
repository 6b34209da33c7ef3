"""Add a scalar bias per pair of offsets (BEiT's, Swin's): in the mask of stock attention, or by slices to tiles.

On a small grid launching operations takes longer than their arithmetic, so this file uses few operations, as timm does:
one cached index looks up the table entry of each pair of tokens, and stock attention takes the entries as its mask.
Compiled and exported graphs do this on larger grids, too, because such a graph serves all sizes.

Elsewhere, on larger grids (without `coords`) the backend `tiled` adds the bias by slices. A query in row y and column x
has the bias table[y' - y, x' - x] for the key in row y' and column x'. First the horizontal offsets are written out, in
one slice for each column x: slice[x][dy, x'] = table[dy, x' - x]. The slices of a head together hold 2 / H as many
numbers as its N x N biases. Vertical offsets then need no copy: the bias of the query for all keys is a contiguous
piece of slice[x] with H rows, whose first row depends on y. So no pair looks up an entry, and all samples of a batch
share the slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.buckets import bucket
from relvit.ops.grid import Grid, once_per_raster
from relvit.ops.inputs import AttentionInputs
from relvit.ops.terms import JointTable
from relvit.ops.tracing import is_compiling


def offset_table(inputs: AttentionInputs) -> Tensor | None:
    """Return the bias of all offsets that queries and keys have, (heads, H + H' - 1, W + W' - 1), key minus query.

    Queries are on a grid of H x W patches, keys on a grid of H' x W'.

    The result keeps the precision of the table, because backward sums the gradient over all tokens.
    """
    bias, bucketing = inputs.terms.bias, inputs.terms.bucketing
    if not isinstance(bias, JointTable):
        return None
    table = bias.table.expand(inputs.query.shape[1], -1, -1)
    for axis, queries, keys in zip((1, 2), (*inputs.grid,)[:2], (*inputs.key_grid,)[:2], strict=True):
        distance = (table.shape[axis] - 1) // 2
        # A table that has exactly the offsets between queries and keys needs no lookup, which would copy it.
        if bucketing != "clip" or not queries - 1 == keys - 1 == distance:
            offsets = torch.arange(1 - queries, keys, device=table.device)
            table = table.index_select(axis, bucket(offsets, distance, bucketing))
    return table


# Three entries for pairs with prefix tokens follow after a flat joint table: for a prefix query with a patch key, for
# a patch query with a prefix key, and for two prefix tokens.
PREFIX_ENTRIES = 3


@once_per_raster
def pair_index(
    grid: Grid, key_size: tuple[int, int, int], distances: tuple[int, int], bucketing: str, device: torch.device
) -> Tensor:
    """Find the entry of a flat joint table, or of the entries after it, for each pair of tokens: (Nq, Nk) int64."""
    first = (2 * distances[0] + 1) * (2 * distances[1] + 1)
    (y, x, off), (key_y, key_x, key_off) = (_places(grid[:3], device), _places(key_size, device))
    rows, cols = (
        bucket(keys - queries[:, None], distance, bucketing)
        for queries, keys, distance in zip((y, x), (key_y, key_x), distances, strict=True)
    )
    patches = rows * (2 * distances[1] + 1) + cols
    of_queries = torch.where(key_off, first + 2, first)
    return torch.where(off[:, None], of_queries, torch.where(key_off, first + 1, patches))


def _places(size: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return row and column of each token of a raster (any for prefix tokens), and which are prefix tokens: (N,)."""
    height, width, prefix = size
    patch = torch.arange(-prefix, height * width, device=device)
    return patch // width, patch % width, patch < 0


class PairPlan(NamedTuple):
    """Values that the shapes of an attention with a joint bias alone determine, remembered for all its calls."""

    heads: int
    scale: float
    index: Tensor  # table entry of each pair of tokens, see `pair_index`
    prefix: bool  # whether the grid has prefix tokens


# PyTorch cannot save a tensor made in inference mode for backward, and training may use this plan later, so make it
# outside of inference mode.
@torch.inference_mode(False)
def plan_of(inputs: AttentionInputs) -> PairPlan:
    """Work out the plan for inputs of `relvit.ops.inputs.checked` with a joint bias on one grid without `coords`."""
    return PairPlan(inputs.query.shape[1], inputs.scale, _index_of(inputs), inputs.grid.prefix > 0)


def attend(
    contents: Sequence[Tensor],
    table: Tensor,
    plan: PairPlan,
    prefix_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Compute attention, (B, heads, N, head_dim), with a joint bias as the mask of stock attention.

    Args:
        contents: queries, keys and values, (B, heads, N, head_dim) each, or all of them in one tensor (B, N, 3 heads,
            head_dim).
        table: the bias by offset, see `JointTable`.
        prefix_bias: (3, heads), see `relvit.layers.PrefixBias`; None: pairs with prefix tokens have no bias.
        attn_mask: numbers that are added to the logits, broadcastable to (B, heads, N, N).
    """
    if len(contents) == 1:
        contents = contents[0].transpose(1, 2).split_with_sizes((plan.heads,) * 3, 1)
    query, key, value = contents
    bias = _of_pairs(table.expand(plan.heads, -1, -1).flatten(1), prefix_bias, plan.index, plan.prefix)
    if attn_mask is not None:
        bias = bias + attn_mask
    if bias.dtype != query.dtype:
        bias = bias.to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=plan.scale)


def _index_of(inputs: AttentionInputs) -> Tensor:
    (table,), key_grid = inputs.terms.bias, inputs.key_grid
    distances = (table.shape[-2] // 2, table.shape[-1] // 2)
    return pair_index(inputs.grid, key_grid[:3], distances, inputs.terms.bucketing, table.device)


def _of_pairs(by_head: Tensor, prefix_bias: Tensor | None, index: Tensor, prefix: bool) -> Tensor:
    """Look the bias of all pairs up in flat tables (heads, entries): (1, heads, Nq, Nk)."""
    if prefix_bias is not None:
        by_head = torch.cat((by_head, prefix_bias.t()), dim=1)
    elif prefix:
        by_head = F.pad(by_head, (0, PREFIX_ENTRIES))
    if by_head.dtype in (torch.bfloat16, torch.float16):
        # Backward adds up the gradients of many pairs, and in half precision a GPU would round each addition.
        by_head = by_head.float()
    if is_compiling():
        # Inductor computes the index of a pair in the kernel that looks the entry up. If pairs had one axis instead of
        # two, Inductor would need minutes to split that axis, because sizes are symbolic expressions in such a graph.
        return by_head[:, index][None]
    return by_head.index_select(1, index.view(-1)).view(1, -1, *index.shape)


def bias_in_mask(inputs: AttentionInputs) -> AttentionInputs:
    """Write the bias out for all pairs, and move it from the terms to `attn_mask`, for stock attention."""
    if not isinstance(inputs.terms.bias, JointTable):
        return inputs
    (table,), query, mask = inputs.terms.bias, inputs.query, inputs.attn_mask
    by_head = table.expand(query.shape[1], -1, -1).flatten(1)
    pairs = _of_pairs(by_head, None, _index_of(inputs), max(inputs.grid.prefix, inputs.key_grid.prefix) > 0)
    bias = pairs.to(query.dtype)
    if inputs.is_causal:
        bias = bias.masked_fill(bias.new_ones(bias.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    return inputs._replace(terms=inputs.terms._replace(bias=None), attn_mask=bias, is_causal=False)


def to_slices(table: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Write out an `offset_table` (see there for H and W) for each column of queries: (heads, W, (H + H' - 1) W')."""
    pieces = table.to(dtype).unfold(2, table.shape[2] - columns + 1, 1)
    # The first piece begins with the lowest offset, so it is the piece of the last column: reverse the order.
    return pieces.transpose(1, 2).flip(1).flatten(2)


def from_slices(slices: Tensor, table: Tensor) -> Tensor:
    """Compute the transpose of `to_slices`: the gradient of the table `table`."""
    heads, height, width = table.shape
    columns = slices.shape[1]
    grad = slices.new_zeros(heads, height, width)
    for column, piece in enumerate(slices.unflatten(2, (height, -1)).unbind(1)):
        grad.narrow(2, columns - 1 - column, piece.shape[2]).add_(piece)
    return grad.to(table.dtype)


def rows_of(
    pairs: Tensor, slices: Tensor, queries: slice, grid: Grid, key_grid: Grid
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each image row of a tile's queries, the row's part of `pairs`, without prefix tokens, and of `slices`.

    Args:
        pairs: (..., heads, queries, Nk), one number for each pair of a query in the tile and a key.
        slices: the slices of the tile's heads.
        queries: which of all queries are in the tile.
        grid, key_grid: grids of queries and keys, without `coords`; prefix tokens are left out.
    """
    at = max(queries.start, grid.prefix)
    while at < queries.stop:
        row, first = divmod(at - grid.prefix, grid.width)
        number = min(grid.width - first, queries.stop - at)
        patches = pairs.narrow(-2, at - queries.start, number)[..., key_grid.prefix :]
        start = (grid.height - 1 - row) * key_grid.width
        yield patches, slices.narrow(1, first, number).narrow(2, start, patches.shape[-1])
        at += number


def write_bias(slices: Tensor, out: Tensor, queries: slice, grid: Grid, key_grid: Grid) -> None:
    """Write the bias of a tile to `out`, like `pairs` of `rows_of`, zeros for prefix tokens; arguments as there."""
    out[..., : key_grid.prefix] = 0
    out[..., : max(0, grid.prefix - queries.start), :] = 0
    for pairs, bias in rows_of(out, slices, queries, grid, key_grid):
        pairs.copy_(bias)
