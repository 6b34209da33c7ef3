"""Multi-head self-attention with relative positions, the attention of relvit's own models."""

import torch
from timm.layers import Attention
from torch import Tensor, nn

from relvit.layers.attention_weights import show_weights
from relvit.layers.positions.factory import check_position
from relvit.ops import Grid, RelativeTerms, from_windows, relative_attention, to_windows
from relvit.ops.attention import BACKENDS
from relvit.ops.checks import check_backend, check_heads
from relvit.ops.terms import add_channels
from relvit.ops.windows import exceeds_window


class RelativeAttention(Attention):
    """timm's `Attention` with `relvit.ops.relative_attention` between its projections.

    All parameters and options are those of `timm.layers.Attention` (so its weights load), plus a position module. The
    tables act on queries after `q_norm`.

    Args:
        dim: width of the tokens.
        num_heads: number of heads.
        position: module that maps a `Grid` to `RelativeTerms`, such as `RelativePosition2d`; it may also be set later
            as the attribute `position`. None: plain attention.
        backend: see `relvit.ops.relative_attention`; an attribute that may be set at any time.
        **kwargs: see `timm.layers.Attention`.

    Attributes:
        rope: module that rotates queries and keys, `RotaryEmbedding2d`; position tables meet those that are not
            rotated. None: they are not.
        prefix_bias: `PrefixBias`, or None.
        trained_keys: see `relvit.ops.relative_attention`; `relvit.models.set_reach` sets it.
        window: rows and columns of patches; on larger grids tokens attend within windows of this size. None: to all.

    Raises:
        ValueError: an unknown backend, or a number of heads that does not divide `dim`.
        TypeError: a `position` that is no module, such as the class of one.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        position: nn.Module | None = None,
        backend: str = "auto",
        **kwargs: object,
    ) -> None:
        check_backend(backend, tuple(BACKENDS))
        check_heads(dim, num_heads)
        if position is not None:
            check_position(position)
        super().__init__(dim, num_heads, **kwargs)
        self.position = position
        self.rope: nn.Module | None = None
        self.prefix_bias: nn.Module | None = None
        self.backend = backend
        self.trained_keys: int | None = None
        self.window: tuple[int, int] | None = None

    def forward(
        self,
        x: Tensor,
        grid: Grid,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        memory: Tensor | None = None,
        key_grid: Grid | None = None,
    ) -> Tensor:
        """Map (B, N, dim) tokens to (B, N, dim).

        Args:
            x: tokens of `grid`.
            grid: where they are.
            attn_mask: see `relvit.ops.relative_attention`.
            is_causal: see `relvit.ops.relative_attention`.
            memory: (B, M, dim), further tokens to attend to, in front of those of `x`; not in windows.
            key_grid: where the tokens of `memory` and `x` are; offsets go from those of `grid` to these.
        """
        if exceeds_window(grid, self.window, attn_mask, is_causal):
            windows, inner = to_windows(x, grid, self.window)
            return from_windows(self.forward(windows, inner), grid, self.window)
        keys = x if memory is None else torch.cat((memory, x), dim=1)
        q, k, v = self.project(keys)
        if memory is not None:
            q = q[:, :, -x.shape[1] :]
        terms = self.relative_terms(x, grid, key_grid)
        q, k, position_query, position_key = self.rotate(q, k, grid, grid if key_grid is None else key_grid)
        options = {
            "key_grid": key_grid,
            "attn_mask": attn_mask,
            "is_causal": is_causal,
            "scale": self.scale,
            "trained_keys": self.trained_keys,
            "position_query": position_query,
            "position_key": position_key,
        }
        show_weights(self.attn_drop, q, k, terms, grid, **options)
        dropout_p = self.attn_drop.p if self.training else 0.0
        mixed = relative_attention(q, k, v, terms, grid, dropout_p=dropout_p, backend=self.backend, **options)
        return self.output(x, mixed)

    def relative_terms(self, x: Tensor, grid: Grid, key_grid: Grid | None = None) -> RelativeTerms:
        """Compute the terms for tokens `x`, (B, N, dim) on `grid`, that attend to those of `key_grid`."""
        keys = grid if key_grid is None else key_grid
        if self.position is None:
            terms = RelativeTerms()
        elif hasattr(self.position, "terms"):
            terms = self.position.terms(x, grid, keys)
        else:
            terms = self.position(keys)
        return terms if self.prefix_bias is None else add_channels(terms, self.prefix_bias(grid, keys))

    def rotate(
        self, query: Tensor, key: Tensor, grid: Grid, key_grid: Grid
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Rotate queries and keys; return them, and as they were, which is what tables meet (None: the same)."""
        if self.rope is None:
            return query, key, None, None
        return self.rope(query, grid), self.rope(key, key_grid), query, key

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values (B, heads, N, head_dim) of (B, N, dim) tokens."""
        B, N, _ = x.shape
        # Unbound before they are transposed, so that backward stacks the gradients as the projection wants them.
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        # Under autocast a norm may return float32 where the value is in half precision.
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if hasattr(self.position, "content_bias"):
            # Transformer-XL's u.
            q = q + self.position.content_bias[:, None].to(q.dtype)
        return q, k, v

    def output(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Compute the result (B, N, dim) of tokens (B, N, dim) from their mixed values (B, heads, N, head_dim)."""
        out = self.norm(mixed.transpose(1, 2).flatten(2))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))
