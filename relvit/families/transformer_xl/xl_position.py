"""Transformer-XL's relative positions: sinusoids of the offset through a learned projection, and the biases u and v."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relvit.layers.positions.base import Position, axis_offsets
from relvit.ops import AxisTables, Grid, RelativeTerms
from relvit.ops.checks import int_pair


class TransformerXLPosition2d(Position):
    """Positions of Transformer-XL (Dai et al. 2019, arXiv 1901.02860, section 3.3) for rows and columns of an image.

        logit_ij = scale * ((q_i + u) . k_j + (q_i + v) . W_R R_ij)

    Query i is in row y_i and column x_i, key j in row y_j and column x_j. R_ij has the width 4 F, with F = head_dim
    num_heads // 4. R_ij holds the sines and cosines of y_i - y_j, then the sines and cosines of x_i - x_j, each at F
    frequencies from 1 down to almost 1 / 10000 (Vaswani et al. 2017, arXiv 1706.03762, section 3.5). So W_R R_ij is
    exactly a sum a(y_i - y_j) + b(x_i - x_j) of an entry of a row table and an entry of a column table; each head has
    such tables, which are computed for the grid. If i or j is a prefix token, the product with W_R is zero.

    relvit's terms are u as `query_bias`, a and b as key tables, and scale (v - u) . a and scale (v - u) . b as a bias:
    the key tables are multiplied by q_i + u instead of q_i + v, and the bias adds the product with v - u.

    In the authors' PyTorch code all blocks share one u and one v. Here each block has its own, as in their TensorFlow
    code with `untie_r`.

    Examples:
        >>> terms = TransformerXLPosition2d(head_dim=64, num_heads=3)(make_grid(4, 6))
        >>> terms.key.rows.shape, terms.query_bias.shape
        (torch.Size([3, 7, 64]), torch.Size([3, 64]))

    Args:
        head_dim: width of one attention head; the scale is head_dim ** -0.5.
        num_heads: number of heads.
        max_distance: larger offsets are clipped to this number of patches (`clamp_len` in the authors' code), one
            number for both axes or (rows, columns); None: no offset is clipped.
        init_std: see `Position`.

    Attributes:
        row_weight, col_weight: the two halves of W_R, (num_heads head_dim, 2 F) each.
        content_bias, position_bias: u and v, (num_heads, head_dim) each.

    Raises:
        ValueError: the clip distance or the standard deviation is out of range.
        TypeError: the clip distance is not an integer.
    """

    stretchable = True
    row_weight: nn.Parameter
    col_weight: nn.Parameter
    content_bias: nn.Parameter
    position_bias: nn.Parameter

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        max_distance: int | Sequence[int] | None = None,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(init_std)
        self.max_distance: tuple[int, int] | None = (
            None if max_distance is None else int_pair("max_distance", max_distance, 0)
        )
        dim, options = num_heads * head_dim, {"device": device, "dtype": dtype}
        for name in ("row_weight", "col_weight"):
            setattr(self, name, nn.Parameter(torch.empty(dim, 2 * max(1, dim // 4), **options)))
        for name in ("content_bias", "position_bias"):
            setattr(self, name, nn.Parameter(torch.empty(num_heads, head_dim, **options)))
        self.init_weights()

    def no_weight_decay(self) -> set[str]:
        """Return the names of u and v, which are biases; W_R decays as the projection of the keys does."""
        return {"content_bias", "position_bias"}

    def forward(self, grid: Grid) -> RelativeTerms:
        """Return key tables (num_heads, 2 size - 1, head_dim) and the bias, for the rows and columns of a grid."""
        dy, dx = axis_offsets(grid, self.trained_grid, self.max_distance, self.row_weight)
        rows, cols = self._table(self.row_weight, dy), self._table(self.col_weight, dx)
        # Multiply elementwise and sum, because autocast would compute a matrix product in half precision.
        turned = self.content_bias.shape[1] ** -0.5 * (self.position_bias - self.content_bias)[:, None]
        bias = AxisTables((rows * turned).sum(dim=-1), (cols * turned).sum(dim=-1))
        return RelativeTerms(key=AxisTables(rows, cols), bias=bias, query_bias=self.content_bias)

    def _table(self, weight: Tensor, offsets: Tensor) -> Tensor:
        """Compute W_R R of all offsets on an axis, (num_heads, 2 size - 1, head_dim)."""
        number = weight.shape[1] // 2
        frequencies = 10000.0 ** (-torch.arange(number, device=offsets.device, dtype=offsets.dtype) / number)
        # In the paper an offset is query minus key, in relvit key minus query, so change the sign.
        angles = -offsets[:, None] * frequencies
        sinusoids = torch.cat((angles.sin(), angles.cos()), dim=-1).to(weight.dtype)
        return F.linear(sinusoids, weight).unflatten(-1, self.content_bias.shape).transpose(0, 1)

    def extra_repr(self) -> str:
        heads, head_dim = self.content_bias.shape
        return f"head_dim={head_dim}, num_heads={heads}, max_distance={self.max_distance}, init_std={self.init_std}"
