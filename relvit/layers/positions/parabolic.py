"""PaPE's parabolic positions: content-dependent parabolas of the offset, as free channels of queries and keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relvit.layers.positions.base import Position, initialise, is_stretched
from relvit.ops import Channels, Grid, RelativeTerms
from relvit.ops.checks import integer
from relvit.ops.grid import batched_coords


class ParabolicPosition2d(Position):
    """Parabolic position encoding, PaPE (Ohrstrom et al. 2026, arXiv 2602.01418), as in the authors' code.

        logit_ij = scale * (q_i . k_j + sum_m (-a_im s_ijm^2 + b_im s_ijm)),   s_ijm = w_m . (p_i - p_j)

    The sum runs over the M parabolas of a head. w_m is a learned direction, p_i the row and column of token i, x_i the
    token i in the input of the attention layer, a_i = softplus(W_a x_i) and b_i = W_b x_i.

    The sum over m is a quadratic form in p_i - p_j: an inner product of 6 channels at any image size. A key at row v
    and column u has the channels 1, v^2, vu, u^2, v, u. (The authors use ten channels, because vu, v, u and 1 come
    twice in their code.) Coordinates count from the middle of the grid, which only changes rounding errors. Prefix
    tokens have no parabola; the authors put the class token at (0, 0) and patches from (1, 1) on.

    Examples:
        >>> position, grid = ParabolicPosition2d(head_dim=64, num_heads=3), make_grid(4, 6)
        >>> tokens = torch.randn(2, 24, 192)  # its channels depend on the tokens
        >>> position.terms(tokens, grid, grid).channels.query.shape
        torch.Size([2, 3, 24, 6])

    Args:
        head_dim: width of one attention head; the scale is head_dim ** -0.5, and tokens are num_heads head_dim wide.
        num_heads: number of heads.
        parabolas: M, the number of parabolas per head; the default is the authors' number.
        init_std: see `Position`; only for the directions. The default is the standard deviation of the authors' uniform
            distribution.

    Attributes:
        directions: (num_heads, M, 2), the directions w_m of each head, as (row, column).
        coefficients: one linear layer with the rows of W_a and W_b, named `ab` in the authors' code.

    Raises:
        ValueError: `parabolas` is below 1, or `init_std` is negative.
        TypeError: `parabolas` is not an integer.
    """

    needs_tokens = True
    stretchable = True

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        parabolas: int = 50,
        init_std: float = 0.41,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(init_std)
        number = integer("parabolas", parabolas, 1)
        self.scale: float = head_dim**-0.5
        self.directions: nn.Parameter = nn.Parameter(torch.empty(num_heads, number, 2, device=device, dtype=dtype))
        dim, features = num_heads * head_dim, 2 * num_heads * number
        self.coefficients: nn.Linear = nn.Linear(dim, features, bias=False, device=device, dtype=dtype)
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise all parameters."""
        initialise([self.directions], self.init_std)
        self.coefficients.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Return the name of the directions."""
        return {"directions"}

    def terms(self, x: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
        """Compute the channels for tokens `x`, (B, N, dim) on `grid`, that attend to the tokens of `key_grid`."""
        # Call the module instead of its method `forward`, so that hooks run: `torch.nn.utils.prune`, for example,
        # computes the pruned weights in a hook.
        return self(x, grid, key_grid)

    def forward(self, x: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
        """Compute the channels, see `terms`."""
        features = self.coefficients(x)
        return RelativeTerms(
            channels=parabolas(features, self.directions, grid, key_grid, self.trained_grid, self.scale)
        )

    def extra_repr(self) -> str:
        heads, number, _ = self.directions.shape
        return f"num_heads={heads}, parabolas={number}, init_std={self.init_std}"


def parabolas(
    features: Tensor, directions: Tensor, grid: Grid, key_grid: Grid, trained_grid: tuple[int, int] | None, scale: float
) -> Channels:
    """Compute the 6 channels from features (B, N, 2 heads parabolas), a's before b's; float32 at least."""
    dtype = torch.float64 if features.dtype == torch.float64 else torch.float32
    heads, number, _ = directions.shape
    a, b = features.to(dtype).unflatten(-1, (2, heads, number)).unbind(2)
    a = F.softplus(a)
    # Multiply elementwise and sum, because autocast would compute matrix products in half precision. Each result is
    # (B, heads, N).
    down, across = directions.to(dtype).unbind(-1)
    yy = (a * (down * down)).sum(-1).transpose(1, 2)
    yx = (a * (2 * down * across)).sum(-1).transpose(1, 2)
    xx = (a * (across * across)).sum(-1).transpose(1, 2)
    by = (b * down).sum(-1).transpose(1, 2)
    bx = (b * across).sum(-1).transpose(1, 2)
    trained = trained_grid if is_stretched(key_grid, trained_grid) else None
    y, x = _coordinates(grid, key_grid, trained, dtype, features.device)
    v, u = _coordinates(key_grid, key_grid, trained, dtype, features.device)
    constant = by * y + bx * x - yy * y * y - yx * y * x - xx * x * x
    parts = (constant, -yy, -yx, -xx, 2 * yy * y + yx * x - by, 2 * xx * x + yx * y - bx)
    query = torch.stack(parts, dim=-1) * scale
    key = torch.stack((torch.ones_like(v), v * v, v * u, u * u, v, u), dim=-1)
    return Channels(_without_prefix(query, grid.prefix), _without_prefix(key, key_grid.prefix))


def _coordinates(
    grid: Grid, key_grid: Grid, trained: tuple[int, int] | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Count rows and columns of tokens from the middle of `key_grid`, (1 or B, 1, N); prefix tokens get any number."""
    y, x = F.pad(batched_coords(grid, device).to(dtype), (0, 0, grid.prefix, 0))[:, None].unbind(-1)
    y, x = y - (key_grid.height - 1) / 2, x - (key_grid.width - 1) / 2
    if trained is not None:
        y, x = y * trained[0] / key_grid.height, x * trained[1] / key_grid.width
    return y, x


def _without_prefix(channels: Tensor, prefix: int) -> Tensor:
    """Set the 6 channels of each prefix token to zero; `channels` are (..., N, 6) with prefix tokens first."""
    return F.pad(channels[:, :, prefix:], (0, 0, prefix, 0))
