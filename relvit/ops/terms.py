"""`RelativeTerms`, the type that position modules return and attention takes: tables by offset, channels, logits."""

from typing import NamedTuple

import torch
from torch import Tensor

from relvit.ops.checks import check_shape
from relvit.utils.old_torch import compiled_replace


class AxisTables(NamedTuple):
    """One table per axis. Row r of a table is for the offset r - k, with k = (number of rows - 1) / 2.

    Offsets are key minus query, clipped to -k ... k (Shaw et al. 2018, arXiv 1803.02155, section 3.2, for each axis
    of the image separately), so a table always has an odd number of rows, 2k + 1; k may differ between the axes.

    Examples:
        >>> tables = AxisTables(torch.randn(7, 64), torch.randn(9, 64))  # k is 3 for rows and 4 for columns
        >>> above_left = tables.rows[3 - 2] + tables.cols[4 - 1]  # for a key two rows above and one column left
        >>> above_left.shape
        torch.Size([64])

    Attributes:
        rows: (2k + 1, head_dim), shared by all heads, or (heads, 2k + 1, head_dim), for vertical offsets (without
            head_dim where the table holds scalars).
        cols: the same for horizontal offsets.
    """

    rows: Tensor
    cols: Tensor


class JointTable(NamedTuple):
    """One table for both axes: the entry in row r and column c is for the offset (r - k_row, c - k_col).

    Row offsets are clipped to -k_row ... k_row, column offsets to -k_col ... k_col.

    This is the product form of iRPE (Wu et al. 2021, arXiv 2107.14222). A joint table can express any function of both
    offsets, which a sum of a row vector and a column vector cannot, but with k_row = k_col = k it needs (2k + 1)^2
    vectors instead of 2 (2k + 1).

    Examples:
        >>> bias = JointTable(torch.randn(12, 7, 9))  # 12 heads; k is 3 for rows and 4 for columns
        >>> bias.table[:, 3 - 2, 4 - 1].shape  # the numbers of a key two rows above and one column left
        torch.Size([12])

    Attributes:
        table: (2k_row + 1, 2k_col + 1, head_dim), shared by all heads, or (heads, 2k_row + 1, 2k_col + 1, head_dim);
            without head_dim where the table holds scalars.
    """

    table: Tensor


class Channels(NamedTuple):
    """Free channels: numbers of each token whose products are added to the logits, c_ij = query_i . key_j.

    The channels are appended to queries and keys as they are, without tables, so any bias of rank r costs r channels,
    whatever the size of the image. Source: FlashBias (Wu et al. 2025, arXiv 2505.12044, section 3).

    Examples:
        >>> place = torch.randn(1, 12, 196, 4)
        >>> terms = RelativeTerms(channels=Channels(query=place, key=place))  # adds place_i . place_j to each logit

    Attributes:
        query: (1 or B, 1 or heads, Nq, r), prefix tokens included; zeros for prefix tokens without a position.
        key: (1 or B, 1 or heads, Nk, r), likewise.
    """

    query: Tensor
    key: Tensor


class AxisLogits(NamedTuple):
    """Relative logits that are already computed: for each query a number per row and per column of the key grid.

    These logits are for layers whose relative positions `AxisTables` cannot express. In MViTv2, for example, queries
    and keys are pooled with different strides, so their grids differ. `relvit.ops.relative_logits` computes such logits
    from tables.

    Examples:
        >>> logits = AxisLogits(rows=torch.randn(2, 12, 6, 2), cols=torch.randn(2, 12, 6, 3))  # keys on a grid of 2 x 3
        >>> (logits.rows[..., :, None] + logits.cols[..., None, :]).flatten(-2).shape  # what attention adds
        torch.Size([2, 12, 6, 6])

    Attributes:
        rows: (B, heads, Nq, H) for the H rows of the key grid; prefix queries are included, with zeros if they have no
            position.
        cols: (B, heads, Nq, W), likewise for the W columns of the key grid.
    """

    rows: Tensor
    cols: Tensor


@compiled_replace
class RelativeTerms(NamedTuple):
    """The relative terms of one attention layer; None where a term is absent.

    For a query i and a key j that are patches, with offsets dy = y_j - y_i and dx = x_j - x_i, each term gives

        a_ij = rows[clip(dy)] + cols[clip(dx)]   or, with a joint table,   a_ij = table[clip(dy), clip(dx)],

    and zero where i or j is a prefix token; `relvit.ops.relative_attention` gives the formula of all terms together.
    Source: key and value terms Shaw et al. 2018 (arXiv 1803.02155), eq. 3 and 4; query term iRPE (Wu et al. 2021, arXiv
    2107.14222), contextual mode; bias Raffel et al. 2020 (arXiv 1910.10683, section 2.1), here per axis.

    Examples:
        >>> keys = AxisTables(torch.randn(15, 64), torch.randn(15, 64))  # offsets from -7 to 7, shared by heads
        >>> bias = AxisTables(torch.randn(12, 15), torch.randn(12, 15))  # a number for each of 12 heads
        >>> terms = RelativeTerms(key=keys, bias=bias)
        >>> terms.value is None
        True

    Attributes:
        query: a^Q, multiplied by the keys.
        key: a^K, multiplied by the queries.
        value: a^V, added to the values.
        bias: b, one number per head: tables of shape (2k + 1,), shared by all heads, or (heads, 2k + 1). Not scaled.
            Entries must be finite, because some backends multiply unused entries by 0: hide offsets by -1e4, not -inf.
        bucketing: 'clip' or 'piecewise', which row of a table an offset uses; see `relvit.ops.buckets.bucket`.
        channels: c, see `Channels`. Not scaled.
        query_bias: (heads, head_dim), added to all queries before a rotary embedding: Transformer-XL's u (Dai et al.
            2019, arXiv 1901.02860, section 3.3).
        axis_logits: r_ij = rows[i, y_j] + cols[i, x_j] for keys j that are patches, zero for prefix tokens; see
            `AxisLogits`.
    """

    # If you add a field, change all code that has to know the fields: the checks of `inputs.py`, `is_stock`,
    # `attend_projected` (which unpacks the fields by position), code that reads the first four fields as `[:4]`,
    # `LETTERS` in `layers/attention.py`, the reference, the oracle `tests/support/oracles/relative_attention.py`, and
    # all backends. `refusal` of `lean` and of `triton` refuses only fields that it names.
    query: AxisTables | JointTable | None = None
    key: AxisTables | JointTable | None = None
    value: AxisTables | JointTable | None = None
    bias: AxisTables | JointTable | None = None
    bucketing: str = "clip"
    channels: Channels | None = None
    query_bias: Tensor | None = None
    axis_logits: AxisLogits | None = None


def is_stock(terms: RelativeTerms) -> bool:
    """Return whether all pairs of tokens have the logits of stock attention, except for free channels."""
    return terms.axis_logits is None and all(term is None for term in (*terms,)[:4])


def with_query_bias(query: Tensor, terms: RelativeTerms) -> tuple[Tensor, RelativeTerms]:
    """Add the terms' `query_bias` to queries (B, heads, N, head_dim); return them, and the other terms."""
    if terms.query_bias is None:
        return query, terms
    # Check the shape, because a bias of another shape might broadcast to the queries wrongly.
    check_shape("terms.query_bias", terms.query_bias, (query.shape[1], query.shape[3]))
    return query + terms.query_bias[:, None].to(query.dtype), terms._replace(query_bias=None)


def with_width(tables: AxisTables | JointTable) -> AxisTables | JointTable:
    """Turn tables of scalars into tables of vectors of width 1."""
    return type(tables)(*(table[..., None] for table in tables))


def add_channels(terms: RelativeTerms, channels: Channels) -> RelativeTerms:
    """Return terms with additional free channels."""
    if (given := terms.channels) is not None:
        channels = Channels(_join(given.query, channels.query), _join(given.key, channels.key))
    return terms._replace(channels=channels)


def _join(one: Tensor, other: Tensor) -> Tensor:
    """Concatenate channels (1 or B, 1 or heads, N, ...)."""
    batch, heads = max(one.shape[0], other.shape[0]), max(one.shape[1], other.shape[1])
    dtype = torch.promote_types(one.dtype, other.dtype)
    return torch.cat([part.to(dtype).expand(batch, heads, -1, -1) for part in (one, other)], dim=-1)
