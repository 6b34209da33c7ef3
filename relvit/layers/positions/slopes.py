"""ALiBi's slopes in 2D: a bias without parameters that falls with the distance, Manhattan or Euclidean (CROMA)."""

from collections.abc import Sequence

import torch

from relvit.layers.positions.base import Position, axis_offsets
from relvit.ops import AxisTables, Grid, JointTable, RelativeTerms
from relvit.ops.checks import int_pair, integer
from relvit.utils.messages import check_choice

DISTANCES = ("manhattan", "euclidean")


class SlopePosition2d(Position):
    """Bias that falls with the distance of a key, by default the Manhattan distance: -m_h (|dy| + |dx|) in head h.

    The offset of a key is dy rows and dx columns. ALiBi defines the slopes m_h (see `alibi_slopes`) and this bias for
    sequences. As in ALiBi, the attention's scale does not apply to the bias.

    The Manhattan distance is the sum of a distance in rows and a distance in columns, so its bias has one table per
    axis. The Euclidean bias -m_h sqrt(dy^2 + dx^2) of CROMA (Fuller et al. 2023, arXiv 2311.00566, "2D-ALiBi") is not
    such a sum, so it has a joint table.

    Examples:
        >>> bias = SlopePosition2d(head_dim=64, num_heads=8)(make_grid(4, 6)).bias
        >>> bias.rows.shape  # offsets from -3 to 3
        torch.Size([8, 7])
        >>> bias.rows[0, -3:].tolist()  # of keys 1, 2 and 3 rows below
        [-0.5, -1.0, -1.5]

    Args:
        head_dim, dtype: not used, see `Position`.
        num_heads: number of heads.
        max_distance: clip distance of |dy| and |dx| in patches, one for both axes or (rows, columns); None: tables
            reach over the whole grid.
        distance: 'manhattan' or 'euclidean'.

    Raises:
        ValueError: `num_heads` is below 1, `max_distance` is negative, or `distance` is unknown.
        TypeError: `num_heads` is not an integer, or `max_distance` does not hold integers.
    """

    stretchable = True

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        max_distance: int | Sequence[int] | None = None,
        distance: str = "manhattan",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_heads = integer("num_heads", num_heads, 1)
        check_choice("distance", distance, DISTANCES)
        self.distance = distance
        self.max_distance: tuple[int, int] | None = (
            None if max_distance is None else int_pair("max_distance", max_distance, 0)
        )
        self.register_buffer("slopes", torch.empty(num_heads, device=device, dtype=torch.float32), persistent=False)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Compute the slopes."""
        slopes = self.slopes
        slopes.copy_(torch.tensor(alibi_slopes(slopes.shape[0]), dtype=slopes.dtype, device=slopes.device))

    def forward(self, grid: Grid) -> RelativeTerms:
        """Return the bias, in tables (num_heads, 2 H - 1) and (num_heads, 2 W - 1), or a joint one."""
        dy, dx = axis_offsets(grid, self.trained_grid, self.max_distance, self.slopes)
        slopes = -self.slopes[:, None]
        if self.distance == "euclidean":
            return RelativeTerms(bias=JointTable(slopes[..., None] * (dy[:, None] ** 2 + dx**2).sqrt()))
        return RelativeTerms(bias=AxisTables(slopes * dy.abs(), slopes * dx.abs()))

    def extra_repr(self) -> str:
        return f"num_heads={self.slopes.shape[0]}, max_distance={self.max_distance}, distance={self.distance!r}"


def alibi_slopes(num_heads: int) -> list[float]:
    """Compute ALiBi's slopes (Press et al. 2022, arXiv 2108.12409, section 3), one per head.

    For n heads, n a power of two, the slopes are the geometric sequence 2^(-8/n), 2^(-16/n) ... 2^-8. For other n, as
    in the authors' code, the slopes of the next lower power of two come first, then every second slope of the next
    higher power of two.
    """
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * head / lower) for head in range(1, lower + 1)]
    between = [2 ** (-8 * head / (2 * lower)) for head in range(1, 2 * lower + 1, 2)]
    return slopes + between[: num_heads - lower]
