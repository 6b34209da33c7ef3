"""Continuous position bias of Swin Transformer V2: a bias that a small network computes from both offsets."""

import math
from collections.abc import Sequence

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from relvit.layers.positions.base import Position, axis_offsets, initialise, is_stretched
from relvit.ops import Grid, JointTable, RelativeTerms
from relvit.ops.checks import int_pair
from relvit.ops.grid import once_per_raster
from relvit.utils.messages import check_choice

MODES = ("cr", "swin")


class ContinuousPosition2d(Position):
    """Bias that a network computes from both offsets: Swin V2 (Liu et al. 2021, arXiv 2111.09883, section 3.3).

    The bias of a query i in row y_i and column x_i for a key j is b_ij = G(s(y_i - y_j), s(x_i - x_j)), with a network
    G of one hidden layer and ReLU, and a logarithmic scale s:

    - 'cr': s(d) = sign(d) log(1 + |d|), eq. 4 of the paper, in patches, as in timm's `RelPosMlp` with mode 'cr'.
    - 'swin': s(d) = sign(d) log2(1 + |8 d / (window - 1)|) / log2(8), and b_ij = 16 sigmoid(G), without a bias in the
      last layer, as in the authors' code.

    G depends on both offsets together, so its values form a joint table, which is computed for each grid. Parameters
    have the names of timm's `RelPosMlp`; in the authors' code `mlp.fc1` and `mlp.fc2` are `cpb_mlp.0` and `cpb_mlp.2`.

    Examples:
        >>> position = ContinuousPosition2d(head_dim=32, num_heads=3, mode="swin", window=8)
        >>> position(make_grid(4, 6)).bias.table.shape
        torch.Size([3, 7, 11])

    Args:
        head_dim: not used, see `Position`.
        num_heads: number of heads.
        mode: 'cr' or 'swin'.
        hidden_dim: width of the network.
        window: rows and columns of patches in the window (or image) in training, by which 'swin' scales offsets; one
            number for both or (rows, columns).
        init_std: see `Position`; with 'swin', 0 makes the bias 8 for all pairs of patches.

    Raises:
        ValueError: `mode` is unknown, a side of `window` is below 2, or `init_std` is negative.
        TypeError: `window` does not hold integers.
    """

    stretchable = True

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        mode: str = "cr",
        hidden_dim: int = 512,
        window: int | Sequence[int] = 14,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(init_std)
        check_choice("mode", mode, MODES)
        self.mode = mode
        self.window: tuple[int, int] = int_pair("window", window, 2)
        bias = (True, mode == "cr")
        self.mlp: Mlp = Mlp(2, hidden_dim, num_heads, act_layer=nn.ReLU, bias=bias, device=device, dtype=dtype)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise all parameters."""
        self.mlp.fc1.reset_parameters()
        initialise(self.mlp.fc2.parameters(), self.init_std)

    def forward(self, grid: Grid) -> RelativeTerms:
        """Return the bias, a table (num_heads, 2 H - 1, 2 W - 1)."""
        weight = getattr(self.mlp.fc1, "weight", None)
        if not isinstance(weight, Tensor):
            # A module that has replaced `fc1`, such as a user's adapter, may have its weight in a part. After
            # `quantize_dynamic` of `torch.ao.quantization`, `weight` is a method, and layers take float32.
            weight = next(self.mlp.fc1.parameters(), torch.empty(0, dtype=torch.float32))
        trained = self.trained_grid if is_stretched(grid, self.trained_grid) else None
        window = self.window if self.mode == "swin" else None
        offsets, mlp = _scaled_offsets(grid, trained, window, weight.dtype, weight.device), self.mlp
        # Call the layers one by one: timm's `Mlp` also calls modules that do nothing, which would take longer than the
        # arithmetic.
        hidden = mlp.fc1(offsets).relu()
        table = mlp.fc2(mlp.drop1(hidden) if self.training else hidden).permute(2, 0, 1)
        if self.mode == "swin":
            table = 16 * table.sigmoid()
        return RelativeTerms(bias=JointTable(table))

    def extra_repr(self) -> str:
        return f"mode={self.mode!r}, window={self.window}, init_std={self.init_std}"


@once_per_raster
def _scaled_offsets(
    grid: Grid,
    trained_grid: tuple[int, int] | None,
    window: tuple[int, int] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Compute s(d) for all pairs of offsets, (2 H - 1, 2 W - 1, 2); `window`: of 'swin', None for 'cr'."""
    dy, dx = axis_offsets(grid, trained_grid, None, torch.empty(0, dtype=dtype, device=device))
    # The paper's offsets are query minus key, relvit's offsets are key minus query, so change their signs.
    dy, dx = -dy, -dx
    if window is not None:
        dy, dx = dy * 8 / (window[0] - 1), dx * 8 / (window[1] - 1)
    dy, dx = dy.sign() * torch.log1p(dy.abs()), dx.sign() * torch.log1p(dx.abs())
    if window is not None:
        dy, dx = dy / math.log(8), dx / math.log(8)
    height, width = dy.shape[0], dx.shape[0]
    return torch.stack((dy[:, None].expand(height, width), dx.expand(height, width)), dim=-1).to(dtype)
