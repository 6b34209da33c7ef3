"""Learned relative positions: Shaw's tables of clipped offsets, per axis or joint; Segment Anything's tables."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relvit.layers.positions.base import Position, is_stretched, stretch
from relvit.ops import BUCKETINGS, AxisTables, Grid, JointTable, RelativeTerms
from relvit.ops.checks import check_kind, int_pair
from relvit.utils.messages import check_choice

TERMS = {"q": "query", "k": "key", "v": "value", "b": "bias"}
LAYOUTS: dict[str, type[AxisTables] | type[JointTable]] = {"separate": AxisTables, "joint": JointTable}


class RelativePosition2d(Position):
    """Tables of Shaw et al. 2018 (arXiv 1803.02155, section 3.2) for the vertical and the horizontal offset.

    Every term in `rel_terms` has one table per axis, (2k + 1, head_dim), or (num_heads, 2k + 1, head_dim) with
    `shared_heads=False`; row r is for the offset r - k, key minus query, clipped to -k ... k, and k is
    `max_distance`. The bias has one number per head, (num_heads, 2k + 1). Grids of all sizes use the same tables. If
    `trained_grid` is set, tables are interpolated for a grid of another size: offsets are divided by the ratio of this
    size to the size in training.

    Examples:
        >>> position = RelativePosition2d(head_dim=64, num_heads=12, rel_terms="kb", max_distance=(3, 5))
        >>> terms = position(make_grid(4, 6))
        >>> terms.key.rows.shape, terms.key.cols.shape, terms.bias.rows.shape
        (torch.Size([7, 64]), torch.Size([11, 64]), torch.Size([12, 7]))

    Args:
        head_dim: width of one attention head.
        num_heads: number of heads, for tables per head and for the bias.
        rel_terms: letters of the terms, each at most once: 'q' (vectors multiplied with keys), 'k' (vectors multiplied
            with queries), 'v' (vectors added to the values), 'b' (bias); '' for no term.
        max_distance: clip distance k in patches, one for both axes or (rows, columns).
        shared_heads: whether all heads share one set of vectors, as in the paper's big model; in its base model each
            head has its own vectors (section 4.1).
        layout: 'separate' (a table per axis, the two vectors are added) or 'joint' (one table of (2k + 1)^2 vectors,
            which can hold any function of both offsets, but costs more: see the backend 'gathered').
        bucketing: 'clip', or 'piecewise' for iRPE's index, whose 2k + 1 rows reach up to 4k patches away.
        init_std: see `Position`.

    Raises:
        ValueError: `rel_terms` has an unknown letter or the same letter twice, `layout` or `bucketing` is unknown, or
            `max_distance` or `init_std` is negative.
        TypeError: `max_distance` does not hold integers, `shared_heads` is not a bool, or `rel_terms` is not a string.
    """

    stretchable = True

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        rel_terms: str = "kv",
        max_distance: int | Sequence[int] = 7,
        shared_heads: bool = True,
        layout: str = "separate",
        bucketing: str = "clip",
        init_std: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(init_std)
        check_kind("rel_terms", rel_terms, str, "a string of letters such as 'kv'")
        if any(letter not in TERMS for letter in rel_terms) or len(set(rel_terms)) != len(rel_terms):
            letters = ", ".join(f"{letter!r} ({term})" for letter, term in TERMS.items())
            raise ValueError(f"rel_terms must be made of the letters {letters}, each at most once, got {rel_terms!r}")
        check_choice("layout", layout, tuple(LAYOUTS))
        check_choice("bucketing", bucketing, BUCKETINGS)
        if not isinstance(shared_heads, bool):
            raise TypeError(f"shared_heads must be True or False, got {shared_heads!r}")
        self.rel_terms = rel_terms
        self.max_distance: tuple[int, int] = int_pair("max_distance", max_distance, 0)
        self.shared_heads = shared_heads
        self.layout = layout
        self.bucketing = bucketing
        rows, cols = (2 * distance + 1 for distance in self.max_distance)
        offsets = {"rows": (rows,), "cols": (cols,), "table": (rows, cols)}
        # `_names` maps each term, in the order of `RelativeTerms`, to the names of the term's parameters.
        self._names: dict[str, list[str]] = {term: [] for term in TERMS.values()}
        for letter, term in TERMS.items():
            lead = (num_heads,) if letter == "b" or not shared_heads else ()
            tail = () if letter == "b" else (head_dim,)
            for part, shape in offsets.items():
                table = None
                if letter in rel_terms and part in LAYOUTS[layout]._fields:
                    table = nn.Parameter(torch.empty(*lead, *shape, *tail, device=device, dtype=dtype))
                    self._names[term].append(f"{term}_{part}")
                self.register_parameter(f"{term}_{part}", table)
        self.init_weights()

    def no_weight_decay(self) -> set[str]:
        """Return the names of all tables."""
        return {name for name, _ in self.named_parameters()}

    def forward(self, grid: Grid) -> RelativeTerms:
        """Return the tables as terms: the same for every grid, unless `trained_grid` is set and they are stretched."""
        tables, kind, given, trained = [], LAYOUTS[self.layout], self._parameters, self.trained_grid
        for names in self._names.values():
            # Read parameters from the dictionary `_parameters`: looking up an attribute of a module takes PyTorch as
            # long as making a view of a tensor. Parametrized tables are not in that dictionary, so look them up as
            # attributes.
            found = [given[name] if name in given else getattr(self, name) for name in names]
            tables.append(kind(*found) if found else None)
        if trained is None or not is_stretched(grid, trained):
            return RelativeTerms(*tables, self.bucketing)
        pairs = zip(self._names, tables, strict=True)
        return RelativeTerms(*(part and self._stretched(term, part, grid, trained) for term, part in pairs))

    def _stretched(
        self, term: str, tables: AxisTables | JointTable, grid: Grid, trained: tuple[int, int]
    ) -> AxisTables | JointTable:
        # Interpolate along the axis of the offsets: the last axis of a bias table, and the second-to-last axis of a
        # table of vectors.
        axis = -1 if term == "bias" else -2
        down, across = ((size, before, self.bucketing) for size, before in zip((*grid,)[:2], trained, strict=True))
        if isinstance(tables, JointTable):
            return JointTable(stretch(stretch(tables.table, axis - 1, *down), axis, *across))
        return AxisTables(stretch(tables.rows, axis, *down), stretch(tables.cols, axis, *across))

    def extra_repr(self) -> str:
        return (
            f"rel_terms={self.rel_terms!r}, max_distance={self.max_distance}, shared_heads={self.shared_heads}, "
            f"layout={self.layout!r}, bucketing={self.bucketing!r}, init_std={self.init_std}"
        )


class LayerTables:
    """Base of positions that read the tables of a retrofitted attention, which keep their names in the state dict."""

    stretchable = True

    def __init__(self, layer: Any) -> None:
        self.layer = layer  # attention layer with an attribute `trained_grid`, see `Position`

    @property
    def trained_grid(self) -> tuple[int, int] | None:
        """See `Position`."""
        return self.layer.trained_grid

    @trained_grid.setter
    def trained_grid(self, size: tuple[int, int] | None) -> None:
        self.layer.trained_grid = size

    def parameters(self) -> Iterator[Tensor]:
        """Yield the tables: by default those for rows and for columns, as SAM and MViTv2 name them."""
        return iter((self.layer.rel_pos_h, self.layer.rel_pos_w))


class SamTables(LayerTables):
    """Position of Segment Anything's attention after `relvit.retrofit`.

    Source: decomposed relative positions of MViTv2 (Li et al. 2022, arXiv 2112.01526, section 4.1, eq. 3 and 4).

    Args:
        layer: the attention, whose `rel_pos_h` and `rel_pos_w`, (rows, head_dim), hold a vector per offset, query minus
            key, by which SAM multiplies unscaled queries. The attention's `table_grid` holds the numbers of rows and of
            columns of patches in the image or window in training. As in SAM, a table is interpolated if its number of
            rows is not the number of offsets in `table_grid`.
    """

    def __call__(self, grid: Grid) -> RelativeTerms:
        """Return the tables as terms: the same for every grid, unless `trained_grid` is set and they are stretched."""
        trained = self.trained_grid if is_stretched(grid, self.trained_grid) else None
        tables = []
        for axis, table in enumerate(self.parameters()):
            if len(table) != (wanted := 2 * self.layer.table_grid[axis] - 1):
                table = F.interpolate(table.T[None], size=wanted, mode="linear")[0].T
            # Divide by the scale, because `relative_attention` multiplies the products of queries and tables by it.
            table = table.flip(0) / self.layer.scale
            tables.append(table if trained is None else stretch(table, -2, grid[axis], trained[axis], "clip"))
        return RelativeTerms(key=AxisTables(*tables))
