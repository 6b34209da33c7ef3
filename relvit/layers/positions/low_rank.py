"""FlashBias's low-rank positions: factors (by SVD) of a bias between any two places, as free channels of q and k."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relvit.layers.positions.axial import look_up
from relvit.layers.positions.base import Position
from relvit.ops import Channels, Grid, RelativeTerms
from relvit.ops.checks import check_shape, int_pair, integer
from relvit.ops.grid import batched_coords


class LowRankPosition2d(Position):
    """Bias b_ij = f_i . g_j with two learned vectors of width r for each place of a grid, per head.

    Source: FlashBias (Wu et al. 2025, arXiv 2505.12044, section 3): the product of r additional channels of queries and
    keys is a bias of rank r, and learned biases such as Swin's nearly have a low rank; `load_bias` factorises a given
    bias.

    A grid with no more rows (or columns) than the factors uses the first rows of the factors, so a bias that depends on
    offsets alone stays the same. For a larger grid the factors are interpolated linearly, each axis on its own, which
    stretches the bias over the image. In the paper the factors serve one image size only.

    Examples:
        >>> position, grid = LowRankPosition2d(head_dim=64, num_heads=3, rank=4, grid_size=14), make_grid(4, 6)
        >>> position.terms(torch.randn(2, 24, 192), grid, grid).channels.key.shape
        torch.Size([1, 3, 24, 4])

    Args:
        head_dim: not used, see `Position`.
        num_heads: number of heads.
        rank: r, the width of the vectors.
        grid_size: rows and columns of the factors, one number for both or (rows, columns).
        init_std: see `Position`; only for the query's factors, since the key's factors have a standard deviation of 1.

    Raises:
        ValueError: `rank` or a side of `grid_size` is below 1, or `init_std` is negative; in `terms`, a padded batch of
            images that differ in size has more rows or columns than the factors.
        TypeError: `rank` is not an integer, or `grid_size` does not hold integers.
    """

    needs_extent = True
    needs_tokens = True

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        rank: int = 16,
        grid_size: int | Sequence[int] = 14,
        init_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(init_std)
        rank = integer("rank", rank, 1)
        shape = (*int_pair("grid_size", grid_size, 1), num_heads, rank)
        self.query: nn.Parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.key: nn.Parameter = nn.Parameter(torch.empty_like(self.query))
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise the factors."""
        super().init_weights()
        # The key's factors are random even with `init_std=0`: if both factors were zero, neither would get a gradient.
        nn.init.trunc_normal_(self.key)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the factors."""
        return {"query", "key"}

    @torch.no_grad()
    def load_bias(self, bias: Tensor) -> Tensor:
        """Set the factors to the best approximation of a bias between all patches of the grid; see `factorise_bias`.

        Args:
            bias: (heads, H W, H W), patches in raster order.

        Returns:
            (heads,), the relative error of the approximation, see `factorise_bias`.
        """
        rows, columns, heads, rank = self.query.shape
        check_shape("bias", bias, (heads, rows * columns, rows * columns))
        channels, error = factorise_bias(bias, rank)
        for factors, found in zip((self.query, self.key), channels, strict=True):
            factors.zero_()
            factors[..., : found.shape[-1]] = found[0].transpose(0, 1).unflatten(0, (rows, columns))
        return error

    def terms(self, x: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
        """Return the factors for tokens on `grid` that attend to the tokens of `key_grid`; `x` is not used."""
        # Call the module instead of its method `forward`, so that hooks run: `torch.nn.utils.prune`, for example,
        # computes the pruned weights in a hook.
        return self(x, grid, key_grid)

    def forward(self, x: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
        """Return the factors, see `terms`."""
        query, key = factors_at(self.query, grid, key_grid), factors_at(self.key, key_grid, key_grid)
        return RelativeTerms(channels=Channels(query, key))

    def extra_repr(self) -> str:
        rows, columns, heads, rank = self.query.shape
        return f"num_heads={heads}, rank={rank}, grid_size={(rows, columns)}, init_std={self.init_std}"


def factorise_bias(bias: Tensor, rank: int) -> tuple[Channels, Tensor]:
    """Compute the best factors of rank r of a bias by singular values: FlashBias (arXiv 2505.12044, section 3.2).

    Examples:
        >>> channels, error = factorise_bias(torch.randn(3, 24, 24), rank=4)
        >>> channels.query.shape, channels.key.shape
        (torch.Size([1, 3, 24, 4]), torch.Size([1, 3, 24, 4]))

    Args:
        bias: (heads, Nq, Nk), any floating dtype; computed in float64.
        rank: r, the number of channels; if it is larger than min(Nq, Nk), only min(Nq, Nk) channels are returned.

    Returns:
        The factors and their error. The factors are `Channels` (1, heads, Nq, r) and (1, heads, Nk, r) for
        `RelativeTerms.channels`, in the dtype of the bias: singular vectors, multiplied by the square roots of the
        singular values. The error, (heads,) float64, is the Frobenius norm of the difference between the bias and the
        product of its factors, divided by the norm of the bias. No factors of this rank have a smaller error (Eckart &
        Young 1936).

    Raises:
        TypeError, ValueError: `bias` has another shape, or `rank` is not an integer, or is below 1.
    """
    check_shape("bias", bias, ("heads", "Nq", "Nk"))
    rank = integer("rank", rank, 1)
    left, values, right = torch.linalg.svd(bias.to(torch.float64), full_matrices=False)
    roots = values[:, None, :rank].sqrt()
    query, key = left[..., :rank] * roots, right.mT[..., :rank] * roots
    lost, whole = values[:, rank:].norm(dim=-1), values.norm(dim=-1)
    error = torch.where(whole > 0, lost / whole, 0.0)
    return Channels(query[None].to(bias.dtype), key[None].to(bias.dtype)), error


def factors_at(factors: Tensor, grid: Grid, key_grid: Grid) -> Tensor:
    """Return the factors of all tokens of `grid`, (1 or B, heads, N, rank), zeros for prefix tokens.

    `factors` is a parameter of `LowRankPosition2d`, (rows, columns, heads, rank).
    """
    # A graph that compares sizes does not work for all sizes, so compare sizes only for padded batches.
    if key_grid.valid is not None and key_grid.coords is not None:  # noqa: SIM102 (keeps the comparison apart)
        if key_grid.height > factors.shape[0] or key_grid.width > factors.shape[1]:
            rows, cols = (max(pair) for pair in zip((key_grid.height, key_grid.width), factors.shape[:2], strict=True))
            raise ValueError(
                f"images of a native batch have up to {key_grid.height} x {key_grid.width} patches, and factors of "
                f"{factors.shape[0]} x {factors.shape[1]} patches are not stretched for it: give images of one size as "
                "a tensor (B, C, height, width), or build the position with larger factors, "
                f"functools.partial(LowRankPosition2d, grid_size=({rows}, {cols}))"
            )
    of_places = factors_of_grid(factors, key_grid.height, key_grid.width)
    y, x = batched_coords(grid, factors.device).unbind(-1)
    # Queries may lie outside the grid of the keys, so clamp their places to the nearest place in this grid.
    index = y.clamp(0, key_grid.height - 1) * key_grid.width + x.clamp(0, key_grid.width - 1)
    # Look up in float32 at least: backward adds up the gradients of all images, and in half precision each addition
    # would round.
    found = of_places.to(torch.promote_types(of_places.dtype, torch.float32))[index].to(of_places.dtype)
    return F.pad(found, (0, 0, 0, 0, grid.prefix, 0)).transpose(1, 2)


def factors_of_grid(factors: Tensor, height: int, width: int) -> Tensor:
    """Resample factors (rows, columns, heads, rank) to another grid: (height width, heads, rank)."""
    columns, heads, rank = factors.shape[1:]
    index = torch.arange(height, device=factors.device)
    rows = look_up(factors.flatten(1), index, height).view(height, columns, heads * rank)
    index = torch.arange(width, device=factors.device)
    both = look_up(rows.transpose(0, 1).flatten(1), index, width).view(width, height, heads, rank)
    return both.transpose(0, 1).flatten(0, 1)
