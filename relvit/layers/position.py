"""Learned relative positions in 2D: Shaw's clipped offset tables, rows and columns apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from timm.layers import trunc_normal_
from torch import nn

from relvit.ops import AxisTables, Grid, RelativeTerms

TERMS = {"k": "key", "v": "value"}


class RelativePosition2d(nn.Module):
    """Tables of Shaw et al. 2018 (arXiv 1803.02155, section 3.2) for the vertical and the horizontal offset.

    For every term in `rel_terms` it holds one table per axis, (2k + 1, head_dim), or (num_heads, 2k + 1, head_dim) with
    `shared_heads=False`; row r belongs to the offset r - k, key minus query, clipped to -k ... k. Called with a `Grid`
    it returns the `RelativeTerms` for `relvit.ops.relative_attention`; these tables serve every grid alike.

    Args:
        head_dim: width of one attention head.
        num_heads: number of heads, for tables per head.
        rel_terms: letters of the terms, each at most once: 'k' (keys), 'v' (values); '' for none.
        max_distance: clip distance k in patches, one for both axes or (rows, columns).
        shared_heads: one set of tables for all heads, as in the paper.
        init_std: standard deviation of the truncated normal that the tables start from; 0 starts at zero, where the
            layer computes plain attention.

    Raises:
        ValueError: unknown or repeated letters, a negative clip distance or standard deviation.
        TypeError: a clip distance that is not an integer.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        rel_terms: str = "kv",
        max_distance: int | Sequence[int] = 7,
        shared_heads: bool = True,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        unknown = [letter for letter in rel_terms if letter not in TERMS]
        if unknown or len(set(rel_terms)) != len(rel_terms):
            raise ValueError(
                "rel_terms must be made of the letters 'k' (keys) and 'v' (values), each at most once, "
                f"got {rel_terms!r}"
            )
        if init_std < 0:
            raise ValueError(f"init_std must not be negative, got {init_std}")
        self.rel_terms = rel_terms
        self.max_distance = _pair(max_distance)
        self.init_std = init_std
        lead = () if shared_heads else (num_heads,)
        for letter, term in TERMS.items():
            for axis, distance in zip(("rows", "cols"), self.max_distance, strict=True):
                table = None
                if letter in rel_terms:
                    table = nn.Parameter(torch.empty(*lead, 2 * distance + 1, head_dim, device=device, dtype=dtype))
                self.register_parameter(f"{term}_{axis}", table)
        self.init_weights()

    def init_weights(self) -> None:
        """Draw the tables anew."""
        for table in self.parameters():
            if self.init_std:
                trunc_normal_(table, std=self.init_std)
            else:
                nn.init.zeros_(table)

    def no_weight_decay(self) -> set[str]:
        """Names of all tables: decay would pull positions towards 'everything is equally far'."""
        return {name for name, _ in self.named_parameters()}

    def forward(self, grid: Grid) -> RelativeTerms:
        """The terms for a grid; the same tables for every grid."""
        return RelativeTerms(
            key=None if self.key_rows is None else AxisTables(self.key_rows, self.key_cols),
            value=None if self.value_rows is None else AxisTables(self.value_rows, self.value_cols),
        )

    def extra_repr(self) -> str:
        return f"rel_terms={self.rel_terms!r}, max_distance={self.max_distance}"


def _pair(max_distance: int | Sequence[int]) -> tuple[int, int]:
    pair = (max_distance, max_distance) if isinstance(max_distance, int) else tuple(max_distance)
    if len(pair) != 2:
        raise ValueError(f"max_distance must be an int or (rows, columns), got {max_distance!r}")
    for distance in pair:
        if isinstance(distance, bool) or not isinstance(distance, int):
            raise TypeError(f"max_distance must hold integers, got {max_distance!r}")
        if distance < 0:
            raise ValueError(f"max_distance must not be negative, got {max_distance!r}")
    return pair
