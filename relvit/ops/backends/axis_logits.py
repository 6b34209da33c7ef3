"""Logits per row and per column of the grid, which add up to the logit of a pair; their lookup indices.

Let a_ij be the vector for query i and key j, the sum of a row of the row table and a row of the column table. Then
q_i . a_ij = rows[i, y_j] + cols[i, x_j], so each query needs H + W products instead of H W. The two tables are joined
into one, and an index says for each token, and each row and each column of the grid, which entry of the joined table
is for their offset.

With the same index the attention weights, summed per row and per column, are added up by table entry. These sums times
the value tables are the value term of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.backends.fusing import computed_together, gather, padded_cat
from relvit.ops.buckets import bucket, saturation
from relvit.ops.grid import Grid, once_per_raster, rows_and_columns
from relvit.ops.inputs import AttentionInputs
from relvit.ops.terms import AxisTables, RelativeTerms, with_width
from relvit.ops.tracing import knows_values, relies_on_strides, without_autocast
from relvit.utils.old_torch import compiled_replace

# PyTorch's fused kernels need head widths that are multiples of 8, which also make products on the CPU faster. So the
# width of augmented vectors, and the number of entries of a joined table, are rounded up to a multiple of this number.
WIDTH_MULTIPLE = 8

# `Distances` are the clip distances of a term's two tables: of the row table, then of the column table.
Distances = tuple[int, int]


@compiled_replace
class AxisRange(NamedTuple):
    """Consecutive rows, or columns, of a grid."""

    first: int
    size: int


# `Axes` are the range of rows and the range of columns for which logits are computed.
Axes = tuple[AxisRange, AxisRange]


def grid_axes(grid: Grid) -> Axes:
    """Return all rows and columns of a grid."""
    return AxisRange(0, grid.height), AxisRange(0, grid.width)


def with_columns(axes: Axes, number: int) -> Axes:
    """Append columns to the axes of a grid."""
    rows, cols = axes
    return rows, cols._replace(size=cols.size + number)


def query_axes(inputs: AttentionInputs) -> Axes:
    """Return all rows and columns of queries, as far as the query term's tables can distinguish them.

    Queries with coordinates may lie outside the key grid. All rows (or columns) that are farther from the key grid than
    the tables can distinguish have the same logits, so one row (or column) stands for all of them.
    """
    grid, key_grid = inputs.grid, inputs.key_grid
    if inputs.terms.query is None or grid.coords is None or grid is key_grid:
        return grid_axes(grid)
    rows, cols = (saturation(distance, inputs.terms.bucketing) for distance in clip_distances(inputs.terms.query))
    return AxisRange(-rows, key_grid.height + 2 * rows), AxisRange(-cols, key_grid.width + 2 * cols)


def clip_distances(tables: AxisTables) -> Distances:
    """Return the clip distances of tables of vectors, ([heads,] 2k + 1, dim) each."""
    return (tables.rows.shape[-2] - 1) // 2, (tables.cols.shape[-2] - 1) // 2


def axis_indices(axes: Axes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number all rows and all columns, (H,) and (W,) int64."""
    (top, height), (left, width) = axes
    return torch.arange(top, top + height, device=device), torch.arange(left, left + width, device=device)


@once_per_raster
def table_index(
    grid: Grid, distances: Distances, bucketing: str, axes: Axes, device: torch.device, spare: int = 0
) -> tuple[Distances, Tensor]:
    """Find the table entry for each token of `grid` and each row, then each column of `axes`.

    Returns clip distances and an index. Tables may be shortened to these clip distances, because no pair of tokens uses
    the rows beyond; if at most `spare` rows are unused, the table stays whole, which saves slicing it. The index, (1 or
    B, 1, N, H + W) int64, counts rows of the result of `join_tables`; for prefix tokens it is 0, the row of zeros.
    """
    reach = distances
    # Only tables with clipping can be shortened, and only if the largest offset is known: tokens with `coords` may lie
    # outside the grid, and a graph for all sizes must not depend on whether a table has larger offsets than the grid.
    if grid.coords is None and bucketing == "clip" and knows_values():
        # No pair of tokens has an offset as large as these sizes, so rows of a table for these and larger offsets can
        # be cut off.
        sizes = (max(size, axis.size) for size, axis in zip((grid.height, grid.width), axes, strict=True))
        reach = tuple(
            distance if 2 * (distance - size + 1) <= spare else size - 1
            for distance, size in zip(distances, sizes, strict=True)
        )
    y, x = rows_and_columns(grid, device)
    rows, cols = axis_indices(axes, device)
    row_index = bucket(rows - y, reach[0], bucketing) + 1
    col_index = bucket(cols - x, reach[1], bucketing) + (1 + 2 * reach[0] + 1)
    return reach, F.pad(padded_cat((row_index, col_index), -1), (0, 0, grid.prefix, 0))[:, None]


def join_tables(tables: AxisTables, reach: Distances, dtype: torch.dtype) -> Tensor:
    """Join a zero row, the rows of both tables that are in `reach`, and zero rows: ([heads,] entries, dim).

    The last zero rows make the number of entries a multiple of `WIDTH_MULTIPLE`.
    """
    # A whole table is not sliced, because the backward of a slice would copy the table.
    middles = [
        table if near == distance else table.narrow(-2, distance - near, 2 * near + 1)
        for table, distance, near in zip(tables, clip_distances(tables), reach, strict=True)
    ]
    after = -(1 + sum(part.shape[-2] for part in middles)) % WIDTH_MULTIPLE
    return padded_cat(middles, -2, before=1, after=after).to(dtype)


class JoinedTables(NamedTuple):
    """Whole tables that `join_tables` has joined already, and their clip distances."""

    table: Tensor
    distances: Distances


def joined_ahead(terms: RelativeTerms, dtype: torch.dtype) -> RelativeTerms:
    """Join whole tables of keys and of values, in a compiled graph by one kernel if their shapes are equal."""
    given = [tables for tables in (terms.key, terms.value) if tables is not None]
    distances = [clip_distances(tables) for tables in given]
    joined = [join_tables(tables, reach, dtype) for tables, reach in zip(given, distances, strict=True)]
    shape = joined[0].shape if joined else ()
    if len(joined) == 2 and joined[1].shape == shape:
        both = computed_together([table.view(1, -1, *shape[-2:]) for table in joined])
        joined = [table.view(shape) for table in both]
    whole = [JoinedTables(*pair) for pair in zip(joined, distances, strict=True)]
    return terms._replace(key=None if terms.key is None else whole[0], value=None if terms.value is None else whole[-1])


def joined_with_index(
    tables: AxisTables | JoinedTables, bucketing: str, grid: Grid, axes: Axes, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the joined tables in the dtype of `like`, and the index of `table_index` into them."""
    if isinstance(tables, JoinedTables):
        return tables.table, table_index(grid, tables.distances, bucketing, axes, like.device)[1]
    reach, index = table_index(grid, clip_distances(tables), bucketing, axes, like.device)
    return join_tables(tables, reach, like.dtype), index


def query_logits(inputs: AttentionInputs, axes: Axes) -> Tensor | None:
    """Compute logits of the key term and the bias for a key in each row and column: (B, heads, Nq, H + W).

    The `axis_logits` of the terms are added. `axes` may have more columns than the grid (see `with_columns`), for which
    `axis_logits` count as zero.
    """
    query, terms, grid = inputs.position_query, inputs.terms, inputs.grid
    logits = None
    if terms.key is not None:
        logits = axis_logits(query, *joined_with_index(terms.key, terms.bucketing, grid, axes, query))
    if terms.axis_logits is not None:
        given = to_finite(torch.cat(terms.axis_logits, dim=-1), query.dtype)
        given = F.pad(given, (0, sum(axis.size for axis in axes) - given.shape[-1]))
        logits = given if logits is None else logits + given
    if not isinstance(terms.bias, AxisTables):
        return logits
    tables = with_width(terms.bias)
    # Compute in single precision at least, because in backward the gradient of an entry is a sum over all tokens.
    table, index = joined_with_index(tables, terms.bucketing, grid, axes, tables.rows)
    table = table[..., 0].to(torch.promote_types(table.dtype, torch.float32)) / inputs.scale
    # Samples on the same grid share one bias, (1 or B, heads, Nq, H + W), so look it up once for each grid instead of
    # for each sample.
    heads = query.shape[1]
    entries = table.expand(heads, -1)[None, :, None].expand(index.shape[0], heads, index.shape[2], -1)
    bias = to_finite(entries.gather(-1, index.expand(-1, heads, -1, -1)), query.dtype)
    return bias.expand(query.shape[0], -1, -1, -1) if logits is None else logits + bias


def to_finite(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the logits of a bias, divided by the scale; in float16, lower the largest, which would become infinite.

    One-hot vectors multiply most logits by 0, and 0 times infinity is NaN. Sums with other logits must be finite, too.
    """
    return (logits.clamp(-3e4, 3e4) if dtype == torch.float16 else logits).to(dtype)


def key_logits(inputs: AttentionInputs, axes: Axes) -> Tensor | None:
    """Compute logits of the query term for a query in each row and column of `axes`: (B, heads, Nk, rows + columns)."""
    key, terms = inputs.position_key, inputs.terms
    if terms.query is None:
        return None
    # Seen from the key, the offset to the query has the other sign, so reverse the tables.
    mirrored = AxisTables(terms.query.rows.flip(-2), terms.query.cols.flip(-2))
    return axis_logits(key, *joined_with_index(mirrored, terms.bucketing, inputs.key_grid, axes, key))


def axis_logits(query: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Compute query_i . rows[r - y_i] for all rows r, then the same for columns: (B, heads, N, H + W).

    One product with all table rows, then a lookup, is faster than a product per row of the grid, because tables are
    short.
    """
    if relies_on_strides():
        # A view with exchanged dimensions is contiguous for one image and not for two: a graph exported with two images
        # would refuse one. So compute the logits in the order (B, heads, N, entries). Read the sizes from `query`,
        # because `torch.onnx.export(dynamo=False)` writes the sizes of computed tensors as constants.
        per_entry = query @ table.transpose(-2, -1)
        return gather(per_entry, index.expand(query.shape[0], query.shape[1], -1, -1))
    per_entry = entry_logits(query, table)
    return gather(per_entry, index.transpose(0, 1).expand(*per_entry.shape[:-1], -1)).transpose(0, 1)


def entry_logits(query: Tensor, table: Tensor) -> Tensor:
    """Multiply queries by all vectors of a joined table: (heads, B, N, entries), the order in memory."""
    # A product per head reads queries in the projection's memory layout: neither forward nor backward copies them.
    by_head = query.permute(1, 0, 2, 3).flatten(1, 2)
    per_entry = torch.bmm(by_head, table.expand(query.shape[1], -1, -1).transpose(-2, -1))
    return per_entry.unflatten(1, (query.shape[0], query.shape[2]))


def times_table(weights: Tensor, table: Tensor) -> Tensor:
    """Multiply (B, N, heads, entries) by a table ([heads,] entries, dim): (B, N, heads, dim)."""
    return weights @ table if table.dim() == 2 else torch.einsum("bnhe,hed->bnhd", weights, table)


def plus_times_table(content: Tensor, weights: Tensor, table: Tensor) -> Tensor:
    """Add `times_table` of float32 or float64 weights to content (B, N, heads, dim), and keep the content's dtype."""
    if table.dim() == 2:
        # One `addmm` adds up in single precision and rounds once, as stock attention does for values, so `content` need
        # not be converted to float32.
        weights, table = weights.to(content.dtype), table.to(content.dtype)
        return torch.addmm(content.flatten(0, 2), weights.flatten(0, 2), table).view(content.shape)
    with without_autocast(content.device):
        return (content + times_table(weights, table.to(weights.dtype))).to(content.dtype)


def by_head(x: Tensor, heads: int | None = None) -> Tensor:
    """Reshape (B, N, heads, dim) to (heads, B N, dim), or the first heads alone: one view where memory allows it."""
    (batch, tokens, of_all, dim), (of_batch, of_token, of_head, of_number) = x.shape, x.stride()
    heads = of_all if heads is None else heads
    if of_batch == tokens * of_token:
        return x.as_strided((heads, batch * tokens, dim), (of_head, of_token, of_number))
    return x.flatten(0, 1).transpose(0, 1)[:heads]


def by_row(x: Tensor) -> Tensor:
    """Reshape (B, N, heads, dim) to (B N heads, dim): one view where memory allows it."""
    # Use `as_strided`, because on small grids `flatten` takes longer than the matrix product that reads the result.
    (batch, tokens, heads, dim), (of_batch, of_token, of_head, of_number) = x.shape, x.stride()
    if of_token == heads * of_head and of_batch == tokens * of_token:
        return x.as_strided((batch * tokens * heads, dim), (of_head, of_number))
    return x.flatten(0, 2)


def product(weights: Tensor, table: Tensor, plus: Tensor | None = None) -> Tensor:
    """Multiply (B, N, heads, rows) by ([heads,] rows, dim), and add `plus`, (B N heads, dim): (B N heads, dim)."""
    if table.dim() == 2:
        weights = weights.view(-1, table.shape[0])
        return torch.mm(weights, table) if plus is None else torch.addmm(plus, weights, table)
    dim, heads_apart = table.shape[-1], by_head(weights)
    out = weights.new_empty(weights.shape[:3].numel(), dim)
    result = by_head(out.view(*weights.shape[:3], dim))
    if plus is None:
        torch.bmm(heads_apart, table, out=result)
    else:
        torch.baddbmm(by_head(plus.view(*weights.shape[:3], dim)), heads_apart, table, out=result)
    return out


def transposed_product(weights: Tensor, vectors: Tensor, table: Tensor) -> Tensor:
    """Sum weights (B, N, heads, rows) times vectors (B, N, heads, dim) over tokens, as the shape of a table says."""
    if table.dim() == 2:
        return torch.mm(weights.view(-1, table.shape[0]).t(), by_row(vectors))
    return torch.bmm(by_head(weights).transpose(1, 2), by_head(vectors))


class View(NamedTuple):
    """Arguments of `Tensor.as_strided`, which takes a fraction of the time of `transpose` and `narrow`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    first: int


@compiled_replace
class Entries(NamedTuple):
    """Joined tables of one term, with zero vectors at the end, and the entries that each token looks up in them."""

    firsts: tuple[int, int]  # index of the first row that is used in the row table, and in the column table
    sizes: tuple[int, int, int]  # numbers of used rows of the row table and of the column table, and of zero vectors
    # These zero vectors, at least one, make the number of entries a multiple of `WIDTH_MULTIPLE`; (heads, ...) if the
    # tables are per head.
    zeros: Tensor
    # (B, N, heads, S) int64, the entry for each of the S rows and columns; for prefix tokens a zero vector's entry.
    index: Tensor
    # `sums` holds zeros, (B, N, heads, entries). `sum_by_entry` calls `sums.scatter_add`, which returns a new tensor.
    # So `index` and `sums` are only read, and can be expanded views, which take little memory.
    sums: Tensor
    # `table` and `factor` are views of this term's entries in the joined tables of all terms: `table` has the axes
    # ([heads,] entries, head_dim), `factor` is transposed for each head, (heads, head_dim, entries). `by_token` is a
    # view (B, N, heads, entries) of the products with `factor`, (heads, B N, entries). All three are None for a bias.
    table: View | None = None
    factor: View | None = None
    by_token: View | None = None


def placed(*terms: Entries | None) -> list[Entries | None]:
    """Work out where the entries of each term are when all tables are joined, ([heads,] entries, head_dim)."""
    total, first, found = sum(0 if part is None else part.sums.shape[-1] for part in terms), 0, []
    for part in terms:
        if part is not None:
            (*lead, _, dim), (batch, tokens, heads, number) = part.zeros.shape, part.sums.shape
            of_head = [total * dim for _ in lead]
            table = View((*lead, number, dim), (*of_head, dim, 1), first * dim)
            factor = View((heads, dim, number), (*(of_head or [0]), 1, dim), first * dim)
            of_token = (tokens * number, number, batch * tokens * number, 1)
            part = part._replace(table=table, factor=factor, by_token=View(part.sums.shape, of_token, 0))
            first += number
        found.append(part)
    return found


def used_pieces(joined: Sequence[Entries], tables: Sequence[Tensor]) -> list[Tensor]:
    """List the rows of tables that are used, and the zeros after both tables of a term."""
    pieces, at = [], 0
    for (first_row, first_col), (rows, cols, _), zeros, *_ in joined:
        of_rows, of_cols = tables[at : at + 2]
        pieces.append(of_rows.narrow(-2, first_row, rows) if first_row else of_rows)
        pieces.append(of_cols.narrow(-2, first_col, cols) if first_col else of_cols)
        pieces.append(zeros)
        at += 2
    return pieces


def split_joined(joined: Sequence[Entries], grads: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Split the gradients of the terms' joined tables into the gradients of each table."""
    if len(grads) == 2 and grads[0].dtype != dtype:
        # `cat` with `out` joins both gradients and converts their dtype in one operation, so call it instead of
        # converting each gradient.
        whole = torch.cat(grads, -2, out=grads[0].new_empty(0, dtype=dtype))
        grads = whole.split_with_sizes([sum(entries.sizes) for entries in joined], -2)
    pieces = []
    for entries, grad in zip(joined, grads, strict=True):
        *of_tables, _ = converted(grad, dtype).split_with_sizes(entries.sizes, -2)
        for first, piece in zip(entries.firsts, of_tables, strict=True):
            # The unused rows of a table lie on both sides of the used rows, and their gradient is zero: pad the
            # gradient of the used rows with zeros on both sides.
            pieces.append(F.pad(piece, (0, 0, first, first)) if first else piece)
    return pieces


def sum_by_entry(entries: Entries, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum numbers for each row and column, (B, N, heads, rows + columns), by table entry: (..., entries)."""
    return converted(entries.sums.scatter_add(-1, entries.index, converted(numbers, entries.sums.dtype)), dtype)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor that has another dtype."""
    # Calling `Tensor.to` costs as much time as launching a small operation, even if the dtype is right already, so call
    # it only if the dtype differs.
    return x if x.dtype == dtype else x.to(dtype)
