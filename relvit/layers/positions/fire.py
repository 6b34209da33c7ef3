"""FIRE's relative positions: a bias that a small network computes from the offset relative to the image's size."""

import torch
from torch import Tensor, nn

from relvit.layers.positions.base import Position, axis_offsets, initialise, refuse_mixed_sizes
from relvit.ops import AxisTables, Grid, RelativeTerms


class FirePosition2d(Position):
    """Bias that a network computes per axis: FIRE (Li et al. 2023, arXiv 2310.04418, eq. 7 to 9, appendix).

        b_ij = f_row(u(y_i - y_j, H)) + f_col(u(x_i - x_j, W))
        u(d, size) = sign(d) psi(|d|) / psi(max(|L|, size - 1)),   psi(x) = log(|c x| + 1)

    for a query i and a key j at rows y and columns x of a grid of H rows and W columns. Each axis has a network f of
    one hidden layer and ReLU, and learned numbers c and L.

    For sizes above L the quotient u has the same range at all sizes, so in large images f is evaluated between points
    seen in training. In the paper the divisor depends on the position of the query; here all queries share the divisor
    that the paper gives to the last token of a sequence (at position size - 1). The sign of u distinguishes keys before
    a query from keys after it.

    Examples:
        >>> position = FirePosition2d(head_dim=64, num_heads=12)
        >>> [position(make_grid(*size)).bias.cols.shape for size in ((4, 6), (20, 30))]
        [torch.Size([12, 11]), torch.Size([12, 59])]

    Args:
        head_dim: not used, see `Position`.
        num_heads: number of heads.
        hidden_dim: width of the networks, 32 as in the paper.
        init_c: initial value of the learned c in the formula above, as in the authors' code.
        threshold: initial value of the learned L in the formula above, in patches.
        init_std: see `Position`.

    Attributes:
        trained_grid: see `Position`; its rows and columns take the place of `size` in u.

    Raises:
        ValueError: `init_std` is negative; or, in `forward`, the grid is of a padded batch, whose images differ in
            size.
    """

    # Offsets are divided by a function of the image's size, so the terms depend on more than offsets.
    needs_extent = True
    stretchable = True

    c: nn.Parameter
    threshold: nn.Parameter

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        hidden_dim: int = 32,
        init_c: float = 0.1,
        threshold: float = 7.0,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(init_std)
        self.init_c: float = init_c
        self.init_threshold: float = threshold

        def network() -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(1, hidden_dim, device=device, dtype=dtype),
                nn.ReLU(),
                nn.Linear(hidden_dim, num_heads, device=device, dtype=dtype),
            )

        self.rows: nn.Sequential = network()
        self.cols: nn.Sequential = network()
        self.c, self.threshold = (nn.Parameter(torch.empty(2, device=device, dtype=dtype)) for _ in range(2))
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise all parameters."""
        for network in (self.rows, self.cols):
            network[0].reset_parameters()
            initialise(network[2].parameters(), self.init_std)
        nn.init.constant_(self.c, self.init_c)
        nn.init.constant_(self.threshold, self.init_threshold)

    def forward(self, grid: Grid) -> RelativeTerms:
        """Return the bias, tables (num_heads, 2 size - 1)."""
        refuse_mixed_sizes(self, grid)
        dy, dx = axis_offsets(grid, self.trained_grid, None, self.c)
        height, width = grid.height, grid.width
        if self.trained_grid is not None:
            height, width = self.trained_grid
        rows, cols = self.rows(self._quotient(0, dy, height)), self.cols(self._quotient(1, dx, width))
        return RelativeTerms(bias=AxisTables(rows.transpose(0, 1), cols.transpose(0, 1)))

    def _quotient(self, axis: int, offsets: Tensor, size: int) -> Tensor:
        """Compute u of all offsets of an axis, (offsets, 1)."""
        c, threshold = self.c[axis].to(offsets.dtype), self.threshold[axis].to(offsets.dtype)
        farthest = threshold.abs().clamp(min=size - 1)
        # As in the authors' code, 1e-6 keeps the divisor positive for c = 0.
        divisor = torch.log1p((c * farthest).abs()) + 1e-6
        # The paper's offset is i - j, query minus key; relvit's is key minus query, so change the sign.
        quotient = -offsets.sign() * torch.log1p((c * offsets).abs()) / divisor
        return quotient.to(self.c.dtype)[:, None]
