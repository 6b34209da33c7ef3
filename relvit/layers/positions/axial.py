"""Learned absolute positions in 2D, rows and columns apart: Reformer's axial embedding."""

from collections.abc import Sequence

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from relvit.layers.init import draw_tables
from relvit.layers.interpolate import larger
from relvit.ops import Grid
from relvit.ops.backends.scripted import register_operator
from relvit.ops.checks import int_pair
from relvit.utils.messages import did_you_mean, listing

COMBINES = ("concat", "sum")


# Sizes of the grid have no value while a graph is traced.
@register_notrace_module
class AxialPositionEmbedding(nn.Module):
    """One vector per row and one per column of the grid, put together for each patch.

    A patch at row r and column c gets concat(rows[r], cols[c]), or rows[r] + cols[c]. For n1 x n2 patches these are
    n1 d1 + n2 d2 numbers, d1 + d2 = dim, or (n1 + n2) dim in the sum, where a plain absolute embedding has n1 n2 dim.
    Source: the concatenation is the axial positional encoding of Reformer (Kitaev et al. 2020, arXiv 2001.04451), in
    the authors' code `AxialPositionalEncoding` of trax; the sum is the factorized embedding of NaViT (Dehghani et al.
    2023, arXiv 2307.06304, section 2.1).

    Every grid is served, each axis on its own. Where it has no more rows than the table, its rows use the first ones
    as they are. Where it has more, H of them over n in the table, the table is stretched: row r lies at
    (r + 1/2) n / H - 1/2, between two rows of the table, and gets their linear interpolation; beyond the outermost the
    outermost holds. That is `torch.nn.functional.interpolate(mode='linear', align_corners=False)`.

    >>> embedding = AxialPositionEmbedding(8, grid_size=(5, 9))
    >>> embedding(make_grid(3, 12)).shape
    torch.Size([36, 8])

    Args:
        dim: width of the tokens.
        grid_size: rows of the tables, n for both axes or (rows, columns): the grid that the embedding is learned on.
        combine: 'concat' or 'sum'.
        widths: (d1, d2), the channels that tell the row and those that tell the column, for 'concat' alone; None:
            halves, the odd channel for the column.
        init_std: standard deviation of the truncated normal that the tables start from; 0 starts at zero.
        device: of the tables.
        dtype: of the tables.

    Raises:
        ValueError: an unknown `combine`, sizes out of range, widths that do not add up to `dim` or are given for the
            sum, a negative standard deviation.
        TypeError: sizes that are not integers.
    """

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
        if combine not in COMBINES:
            hint = did_you_mean(str(combine), COMBINES)
            raise ValueError(f"combine must be one of {listing(COMBINES)}, got {combine!r}{hint}")
        if combine == "sum" and widths is not None:
            raise ValueError(f"widths is for combine 'concat', got widths={widths!r} with combine 'sum'")
        if init_std < 0:
            raise ValueError(f"init_std must not be negative, got {init_std}")
        if combine == "sum":
            widths = (dim, dim)
        elif widths is None:
            widths = (dim // 2, dim - dim // 2)
        widths = int_pair("widths", widths, 1)
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

    @property
    def grid_size(self) -> tuple[int, int]:
        """Rows of the two tables."""
        return self.rows.shape[0], self.cols.shape[0]

    def init_weights(self) -> None:
        """Draw the tables anew."""
        draw_tables(self, self.init_std)

    def no_weight_decay(self) -> set[str]:
        """Names of the tables: decay would pull positions towards 'everything is in one place'."""
        return {"rows", "cols"}

    def set_grid_size(self, grid_size: int | Sequence[int]) -> None:
        """Make what a grid of this size is given the tables: on it nothing changes, others start from there.

        Args:
            grid_size: one size for both axes or (rows, columns).

        Raises: as the constructor.
        """
        for name, size in zip(("rows", "cols"), int_pair("grid_size", grid_size, 1), strict=True):
            table = getattr(self, name)
            lines = torch.arange(size, device=table.device)
            setattr(self, name, nn.Parameter(look_up(table.detach(), lines, size), table.requires_grad))

    def forward(self, grid: Grid) -> Tensor:
        """The embedding of each patch of a grid, none for its prefix tokens: (P, dim), or (B, P, dim) with such coords.

        Coordinates outside the grid are taken for those of the nearest place that has a vector.
        """
        if not torch.jit.is_scripting() and not isinstance(grid, Grid):
            raise TypeError(f"grid must be a Grid, got {type(grid).__name__}: make_grid(height, width) makes one")
        if torch.jit.is_scripting():
            return torch.ops.relvit.axial_embedding(
                self.rows, self.cols, grid.height, grid.width, grid.coords, self.combine
            )
        return axial_embedding(self.rows, self.cols, grid.height, grid.width, grid.coords, self.combine)

    def extra_repr(self) -> str:
        widths = f"({self.rows.shape[1]}, {self.cols.shape[1]})"
        return f"grid_size={self.grid_size}, combine={self.combine!r}, widths={widths}"


def look_up(table: Tensor, lines: Tensor, size: int) -> Tensor:
    """What a table of n vectors, (n, width), has for `lines` (integers, any shape) of an axis of `size` lines.

    Returns:
        (*lines.shape, width), dtype of the table: its own vectors where size <= n, else their linear interpolation.
    """
    # One expression for slices and stretches, without a condition on sizes, so that one graph serves all of them.
    # Positions are integers, in units of 1 / step, so that slices are exact.
    number = table.shape[0]
    length = larger(size, number)
    step = 2 * length
    position = ((2 * lines + 1) * number - length).clamp(min=0)
    before = position // step
    precision = torch.promote_types(table.dtype, torch.float32)
    weight = (position - before * step).to(precision) / step
    low, high = (table[(before + further).clamp(max=number - 1)].to(precision) for further in (0, 1))
    return torch.lerp(low, high, weight[..., None]).to(table.dtype)


def axial_embedding(rows: Tensor, cols: Tensor, height: int, width: int, coords: Tensor | None, combine: str) -> Tensor:
    """What `AxialPositionEmbedding` with tables `rows` and `cols` has for the patches of a grid."""
    if coords is None:
        y = torch.arange(height, device=rows.device)[:, None]
        x = torch.arange(width, device=rows.device)[None, :]
    else:
        y, x = coords.to(torch.int64).unbind(-1)
    rows, cols = look_up(rows, y, height), look_up(cols, x, width)
    if combine == "sum":
        embedding = rows + cols
    else:
        places = torch.broadcast_shapes(y.shape, x.shape)
        embedding = torch.cat((rows.expand(*places, -1), cols.expand(*places, -1)), dim=-1)
    return embedding.flatten(0, 1) if coords is None else embedding


register_operator(
    "axial_embedding(Tensor rows, Tensor cols, int height, int width, Tensor? coords, str combine) -> Tensor",
    axial_embedding,
)
