"""What a position module hands to the attention: tables indexed by clipped row and column offsets."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AxisTables(NamedTuple):
    """One table per axis. Row r of a table belongs to the offset r - k, with k = (number of rows - 1) / 2.

    Offsets are key minus query, clipped to -k ... k (Shaw et al. 2018, arXiv 1803.02155, eq. 3-4, on each axis of the
    image apart), so a table always has an odd number of rows, 2k + 1; k may differ between the axes.

    Attributes:
        rows: (2k + 1, head_dim), shared by all heads, or (heads, 2k + 1, head_dim), for vertical offsets.
        cols: the same for horizontal offsets.
    """

    rows: Tensor
    cols: Tensor


class RelativeTerms(NamedTuple):
    """The relative terms of one attention layer; None where a term is absent.

    With a_ij = rows[clip(y_j - y_i)] + cols[clip(x_j - x_i)] for patch tokens i, j and zero for prefix tokens:

        logit_ij = scale * q_i . (k_j + a^K_ij)        (`key` holds a^K)
        out_i = sum_j softmax_j(logit_ij) (v_j + a^V_ij)   (`value` holds a^V)

    Source: Shaw et al. 2018, eq. 3 and 4.
    """

    key: AxisTables | None = None
    value: AxisTables | None = None
