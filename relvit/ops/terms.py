"""What a position module hands to the attention: tables indexed by clipped row and column offsets."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AxisTables(NamedTuple):
    """One table per axis. Row r of a table belongs to the offset r - k, with k = (number of rows - 1) / 2.

    Offsets are key minus query, clipped to -k ... k (Shaw et al. 2018, arXiv 1803.02155, eq. 3-4, on each axis of the
    image apart), so a table always has an odd number of rows, 2k + 1; k may differ between the axes.

    Attributes:
        rows: (2k + 1, head_dim), shared by all heads, or (heads, 2k + 1, head_dim), for vertical offsets (without
            head_dim where the table holds scalars).
        cols: the same for horizontal offsets.
    """

    rows: Tensor
    cols: Tensor


class RelativeTerms(NamedTuple):
    """The relative terms of one attention layer; None where a term is absent.

    For patch tokens i, j with offsets dy = y_j - y_i and dx = x_j - x_i, each pair of tables gives

        a_ij = rows[clip(dy)] + cols[clip(dx)],

    and zero where i or j is a prefix token. Then

        logit_ij = scale * (q_i . k_j + q_i . a^K_ij + k_j . a^Q_ij) + b_ij
        out_i = sum_j softmax_j(logit_ij) (v_j + a^V_ij)

    Source: key and value terms Shaw et al. 2018 (arXiv 1803.02155), eq. 3 and 4; query term iRPE (Wu et al. 2021, arXiv
    2107.14222), contextual mode; bias Raffel et al. 2020 (arXiv 1910.10683, section 2.1), here per axis.

    Attributes:
        query: a^Q, met by the keys.
        key: a^K, met by the queries.
        value: a^V.
        bias: b, one number per head: tables of shape (2k + 1,), shared by all heads, or (heads, 2k + 1). Not scaled.
        bucketing: 'clip' or 'piecewise', which row of a table an offset uses; see `relvit.ops.buckets.bucket`.
    """

    query: AxisTables | None = None
    key: AxisTables | None = None
    value: AxisTables | None = None
    bias: AxisTables | None = None
    bucketing: str = "clip"
