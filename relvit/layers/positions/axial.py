"""Reformer's axial position embedding: a learned absolute embedding of one vector per row and one per column."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from relvit.layers.mixer import Leaf
from relvit.layers.positions.base import initialise
from relvit.ops import Grid
from relvit.ops.checks import int_pair
from relvit.ops.tracing import larger
from relvit.utils.constants import KeepConstants
from relvit.utils.messages import check_choice

COMBINES = ("concat", "sum")


class AxialPositionEmbedding(KeepConstants, Leaf):
    """Absolute embedding from one vector per row and one per column of the grid.

    A patch at row r and column c gets concat(rows[r], cols[c]), whose widths d1 + d2 add up to dim, or, with
    `combine='sum'`, rows[r] + cols[c].

    Source: the concatenation is `AxialPositionalEncoding` in trax, the code of Reformer's authors, whose paper (Kitaev
    et al. 2020, arXiv 2001.04451) does not describe it; the sum is the factorized embedding of NaViT (Dehghani et al.
    2023, arXiv 2307.06304, section 2.1).

    The tables serve grids of every size: a grid with no more rows than a table uses the table's first rows; for a
    larger grid the table is stretched as by `torch.nn.functional.interpolate(mode='linear', align_corners=False)`.

    Examples:
        >>> embedding = AxialPositionEmbedding(8, grid_size=(5, 9))
        >>> embedding(make_grid(3, 12)).shape
        torch.Size([36, 8])

    Args:
        dim: width of the tokens.
        grid_size: number of rows of each table, which is the size of the grid in training: one number for both axes or
            (rows, columns).
        combine: 'concat' or 'sum'.
        widths: (d1, d2), the number of channels for the row and for the column, only for 'concat'; None: half each, and
            an odd channel for the column.
        init_std: standard deviation of the truncated normal that initialises the tables; 0: zeros.

    Raises:
        ValueError: `combine` is unknown, a number in `grid_size` or `widths` is below 1, `widths` do not add up to
            `dim` or are given with 'sum', or `init_std` is negative.
        TypeError: `grid_size` or `widths` does not hold integers.
    """

    rows: nn.Parameter
    cols: nn.Parameter

    def __init__(
        self,
        dim: int,
        grid_size: int | Sequence[int],
        combine: str = "concat",
        widths: Sequence[int] | None = None,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("combine", combine, COMBINES)
        if combine == "sum" and widths is not None:
            raise ValueError(
                f"widths is for combine 'concat', got widths={widths!r} with combine 'sum': leave widths out"
            )
        halves = (dim, dim) if combine == "sum" else (dim // 2, dim - dim // 2)
        widths = int_pair("widths", halves if widths is None else widths, 1)
        if combine == "concat" and sum(widths) != dim:
            raise ValueError(f"widths must add up to dim {dim}, got {widths}, which is {sum(widths)}")
        self.combine = combine
        self.init_std = init_std
        tables = [
            nn.Parameter(torch.empty(size, width, device=device, dtype=dtype))
            for size, width in zip(int_pair("grid_size", grid_size, 1), widths, strict=True)
        ]
        self.rows, self.cols = tables
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise the tables."""
        initialise(self.parameters(), self.init_std)

    @property
    def grid_size(self) -> tuple[int, int]:
        """Rows of the two tables."""
        return self.rows.shape[0], self.cols.shape[0]

    def no_weight_decay(self) -> set[str]:
        """Return the names of the tables."""
        return {"rows", "cols"}

    def set_grid_size(self, grid_size: int | Sequence[int]) -> None:
        """Replace the tables by tables of this size, with which the embedding of a grid of this size stays the same."""
        for name, size in zip(("rows", "cols"), int_pair("grid_size", grid_size, 1), strict=True):
            table = getattr(self, name)
            index = torch.arange(size, device=table.device)
            setattr(self, name, nn.Parameter(look_up(table.detach(), index, size), table.requires_grad))

    def forward(self, grid: Grid) -> Tensor:
        """Compute the embedding of P patches: (P, dim), or (B, P, dim) if each image has its own coords.

        A patch beyond the first or the last row (or column) of a table gets the vector of this row (or column).
        """
        device = self.rows.device
        if grid.coords is None:
            y, x = torch.arange(grid.height, device=device)[:, None], torch.arange(grid.width, device=device)[None, :]
        else:
            y, x = grid.coords.to(torch.int64).unbind(-1)
        rows, cols = look_up(self.rows, y, grid.height), look_up(self.cols, x, grid.width)
        if self.combine == "sum":
            embedding = rows + cols
        else:
            shape = torch.broadcast_shapes(y.shape, x.shape)
            embedding = torch.cat((rows.expand(*shape, -1), cols.expand(*shape, -1)), dim=-1)
        return embedding.flatten(0, 1) if grid.coords is None else embedding

    def extra_repr(self) -> str:
        widths = f"({self.rows.shape[1]}, {self.cols.shape[1]})"
        return f"grid_size={self.grid_size}, combine={self.combine!r}, widths={widths}"


def look_up(table: Tensor, index: Tensor, size: int) -> Tensor:
    """Look up rows (or columns) of a grid that has `size` of them in a table of n vectors, (n, width).

    Returns:
        (*index.shape, width), dtype of the table: vectors of the table if size <= n, otherwise their linear
        interpolation.
    """
    # The same expression computes `position` for size <= n and for size > n, without a condition, so that one graph
    # works for all sizes. The place in the table is `position` / `step`, both integers: for size <= n it is exactly
    # `index`, the weight is exactly 0, and the table's own vectors are returned without rounding.
    number = table.shape[0]
    length = larger(size, number)
    step = 2 * length
    position = ((2 * index + 1) * number - length).clamp(min=0)
    before = position // step
    # Convert the table before the lookup: backward adds up the gradients of all patches that use a vector, and in half
    # precision each addition would round.
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    weight = (position - before * step).to(wide.dtype) / step
    low, high = (wide[(before + further).clamp(max=number - 1)] for further in (0, 1))
    return torch.lerp(low, high, weight[..., None]).to(table.dtype)
