"""Attention-free mixers (AFT) in place of attention: each token gets an average of all values, gated by its query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relvit.families.aft.operations import (
    CONV_BACKENDS,
    FULL_BACKENDS,
    SIMPLE_BACKENDS,
    aft_conv,
    aft_full,
    aft_simple,
    local_bias,
)
from relvit.layers.interpolate import resample_embedding
from relvit.layers.mixer import Mixer
from relvit.layers.positions.base import initialise
from relvit.ops import Grid
from relvit.ops.checks import check_backend, check_heads, int_pair, integer
from relvit.ops.tracing import without_autocast
from relvit.utils.constants import KeepConstants


class AFTSimple(Mixer, KeepConstants):
    """AFT-simple (Zhai et al. 2021, arXiv 2105.14103, section 3.2), the base of the other mixers; see `aft_simple`.

    An AFT mixer can replace attention: its `forward` takes the arguments of `RelativeAttention.forward`.

    Examples:
        >>> AFTSimple(192, num_heads=3)(torch.randn(2, 24, 192), make_grid(4, 6)).shape
        torch.Size([2, 24, 192])

    Args:
        dim: width of the tokens.
        num_heads: number of heads; has an effect only in `AFTConv2d`, whose biases and keys differ between heads.
        qkv_bias: whether the projections to query, key and value have a bias, as in the paper.
        proj_bias: whether the output's projection has a bias.
        proj_drop: dropout rate after the output's projection.
        backend: see `aft_conv` and `aft_full`; an attribute that may be set at any time.

    Raises:
        ValueError: the width is not a multiple of the number of heads, or the backend is unknown.
    """

    lacks: ClassVar[Mapping[str, str]] = Mixer.lacks | {"weights": "is attention-free"}
    # A head's keys have this number of channels; None: as many channels as the values.
    key_dim: int | None = None
    backends: Sequence[str] = SIMPLE_BACKENDS

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        *,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_backend(backend, self.backends)
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.head_dim: int = dim // num_heads
        self.keys: int = self.key_dim or self.head_dim
        self.backend = backend
        # One projection yields the queries of all heads, then the keys, then the values.
        outputs = num_heads * (self.head_dim + self.keys + self.head_dim)
        self.qkv: nn.Linear = nn.Linear(dim, outputs, bias=qkv_bias, device=device, dtype=dtype)
        self.proj: nn.Linear = nn.Linear(dim, dim, bias=proj_bias, device=device, dtype=dtype)
        self.proj_drop: nn.Dropout = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, grid: Grid, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Map (B, N, dim) tokens of `grid` to (B, N, dim); with `is_causal` a token ignores later tokens.

        Raises:
            ValueError: an `attn_mask` is given; put padding into the grid's `valid`.
        """
        self.refuse_mask(attn_mask)
        wide, narrow = self.num_heads * self.head_dim, self.num_heads * self.keys
        parts = self.qkv(x).split((wide, narrow, wide), dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        x = self.mix(query, key, value, grid, is_causal)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, is_causal: bool) -> Tensor:
        """Compute gated averages (B, heads, N, head_dim)."""
        return aft_simple(query, key, value, grid, is_causal=is_causal, backend=self.backend)


class AFTFull(AFTSimple):
    """AFT-full (arXiv 2105.14103, eq. 2): a learned bias for every pair of places, w = u v^T; see `aft_full`.

    Examples:
        >>> AFTFull(192, grid_size=(4, 6), bias_dim=32)(torch.randn(2, 70, 192), make_grid(7, 10)).shape
        torch.Size([2, 70, 192])

    Args:
        dim, **kwargs: see `AFTSimple`.
        num_heads: number of heads, which share the bias; the paper has one.
        grid_size: rows and columns of the grid on which the factors u and v are learned, one number for both or a pair.
            On other grids the factors are interpolated, as absolute embeddings are.
        prefix: number of tokens before the patches; each of these tokens has its own factors.
        bias_dim: number of columns of u and of v; 128 in the paper on ImageNet.

    Raises:
        ValueError: `grid_size` or `bias_dim` is below 1; in `forward`, the grid has another number of prefix tokens
            than `prefix`.
        TypeError: a size is not an integer.
    """

    lacks: ClassVar[Mapping[str, str]] = AFTSimple.lacks | {"native": "has the bias of one grid"}
    backends: Sequence[str] = FULL_BACKENDS
    window: tuple[int, int] | None = None

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        *,
        grid_size: int | Sequence[int],
        prefix: int = 0,
        bias_dim: int = 128,
        **kwargs: object,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        bias_dim = integer("bias_dim", bias_dim, 1)
        rows, cols = int_pair("grid_size", grid_size, 1)
        self.grid_size: tuple[int, int] = (rows, cols)
        self.prefix = prefix
        self.u: nn.Parameter = nn.Parameter(self.proj.weight.new_empty(prefix + rows * cols, bias_dim))
        self.v: nn.Parameter = nn.Parameter(torch.empty_like(self.u))
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise both factors from a normal distribution of standard deviation 0.01."""
        for factor in (self.u, self.v):
            nn.init.normal_(factor, std=0.01)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the factors."""
        return {"u", "v"}

    def set_grid_size(self, grid_size: int | Sequence[int]) -> None:
        """Replace the factors by factors for another grid, interpolated as `forward` does for images of this size."""
        new = int_pair("grid_size", grid_size, 1)
        for name in ("u", "v"):
            factor = getattr(self, name)
            resized = resample_embedding(factor.detach()[None], self.grid_size, new, self.prefix)[0]
            setattr(self, name, nn.Parameter(resized, factor.requires_grad))
        self.grid_size = new

    def learned_bias(self, grid: Grid) -> Tensor:
        """Compute w for all places of a grid, (T, T), T = prefix + H W, queries first, in float32 at least."""
        if grid.prefix != self.prefix:
            raise ValueError(
                f"the grid has prefix {grid.prefix}, the layer is built for {self.prefix}: build the layer with "
                f"prefix={grid.prefix}, or give make_grid(..., prefix={self.prefix})"
            )
        size, precision = (grid.height, grid.width), torch.promote_types(self.u.dtype, torch.float32)
        u, v = (
            resample_embedding(factor.to(precision)[None], self.grid_size, size, self.prefix)[0]
            for factor in (self.u, self.v)
        )
        # An error of the bias multiplies a weight by exp(error), so autocast must not compute this product in half
        # precision.
        with without_autocast(u.device):
            bias = u @ v.t()
        return local_bias(bias, self.window, size, self.prefix) if self.window else bias

    def mix(self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, is_causal: bool) -> Tensor:
        """Compute gated averages (B, heads, N, head_dim)."""
        return aft_full(query, key, value, self.learned_bias(grid), grid, is_causal=is_causal, backend=self.backend)

    def extra_repr(self) -> str:
        return f"grid_size={self.grid_size}, prefix={self.prefix}, bias_dim={self.u.shape[1]}"


class AFTLocal(AFTFull):
    """AFT-local (arXiv 2105.14103, eq. 4): `AFTFull` whose bias is zero between places that are far apart.

    Examples:
        >>> AFTLocal(192, grid_size=(4, 6), window=3)(torch.randn(2, 24, 192), make_grid(4, 6)).shape
        torch.Size([2, 24, 192])

    Args:
        window: see `aft_local`.
        **kwargs: the arguments of `AFTFull`.
    """

    def __init__(self, dim: int, num_heads: int = 1, *, window: int | Sequence[int] = 4, **kwargs: object) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.window: tuple[int, int] | None = int_pair("window", window, 0)

    def extra_repr(self) -> str:
        return f"window={self.window}, {super().extra_repr()}"


class AFTConv2d(AFTSimple):
    """AFT-conv (arXiv 2105.14103, eq. 6): a learned bias per head by offset, zero outside a window; see `aft_conv`.

    Each head learns a filter f of the window's size, and two numbers, gamma and beta. The biases in the window are w =
    gamma (f - mean(f)) / std(f) + beta. As gamma and beta start at zero, the mixer starts as AFT-simple. A token's key
    is one number per head. The mixer takes any grid; a grid of one row gives the paper's form for sequences.

    Examples:
        >>> AFTConv2d(192, num_heads=12, kernel_size=(5, 7))(torch.randn(2, 24, 192), make_grid(4, 6)).shape
        torch.Size([2, 24, 192])

    Args:
        dim, num_heads, **kwargs: see `AFTSimple`.
        kernel_size: rows and columns of the window, odd, one number for both or a pair.

    Raises:
        ValueError: a size is even or below 1.
        TypeError: a size is not an integer.
    """

    key_dim: int | None = 1
    backends: Sequence[str] = CONV_BACKENDS

    def __init__(self, dim: int, num_heads: int, *, kernel_size: int | Sequence[int] = 11, **kwargs: object) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.kernel_size: tuple[int, int] = int_pair("kernel_size", kernel_size, 1)
        if any(size % 2 == 0 for size in self.kernel_size):
            raise ValueError(f"kernel_size must be odd, the query is in its middle, got {kernel_size!r}")
        self.kernel: nn.Parameter = nn.Parameter(self.proj.weight.new_empty(num_heads, *self.kernel_size))
        self.gamma: nn.Parameter = nn.Parameter(self.kernel.new_empty(num_heads))
        self.beta: nn.Parameter = nn.Parameter(self.kernel.new_empty(num_heads))
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise the filters at random, and set gamma and beta to zero."""
        # In the first step gamma is 0, so the filters get no gradients. If all numbers of a filter were equal, gamma
        # would get no gradient either, so initialise the filters at random.
        initialise([self.kernel], 0.02)
        nn.init.zeros_(self.gamma)
        nn.init.zeros_(self.beta)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the filters, gamma and beta."""
        return {"kernel", "gamma", "beta"}

    def learned_bias(self, grid: Grid) -> Tensor:
        """Compute w by offset, (heads, *kernel_size), the same for all grids, in float32 at least."""
        # An error of w multiplies a weight by exp(error), so do not compute w in half precision.
        precision = torch.promote_types(self.kernel.dtype, torch.float32)
        kernel, gamma, beta = (part.to(precision) for part in (self.kernel, self.gamma, self.beta))
        filters = F.layer_norm(kernel.flatten(1), (kernel.shape[1] * kernel.shape[2],), eps=1e-8)
        return (gamma[:, None] * filters + beta[:, None]).view_as(kernel)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, is_causal: bool) -> Tensor:
        """Compute gated averages (B, heads, N, head_dim)."""
        return aft_conv(query, key, value, self.learned_bias(grid), grid, is_causal=is_causal, backend=self.backend)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, kernel_size={self.kernel_size}"
