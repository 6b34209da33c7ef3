"""timm's multi-head self-attention with relative positions."""

import torch
from timm.layers import Attention, register_notrace_function
from torch import Tensor, nn

from relvit.layers.attention_weights import show_weights
from relvit.ops import Grid, RelativeTerms, relative_attention
from relvit.ops.attention import BACKENDS
from relvit.ops.backends.scripted import scripted_attention
from relvit.ops.checks import check_backend


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: RelativeTerms | None,
    grid: Grid,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    backend: str,
) -> Tensor:
    """`relvit.ops.relative_attention`, which TorchScript takes as one operator; without terms plain attention."""
    if torch.jit.is_scripting():
        return scripted_attention(query, key, value, terms, grid, attn_mask, is_causal, dropout_p, scale, backend)
    return relative_attention(
        query,
        key,
        value,
        RelativeTerms() if terms is None else terms,
        grid,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        backend=backend,
    )


# Sizes and tables are Python values to the operation: symbolic tracing must not look inside, whoever calls it.
register_notrace_function(attend)
register_notrace_function(relative_attention)


class RelativeAttention(Attention):
    """timm's `Attention` whose keys and values know where they lie relative to the query.

    All parameters and options are those of `timm.layers.Attention` (so its weights load), plus a position module. The
    tables act on queries after `q_norm`. Computes `relvit.ops.relative_attention` between the projections.

    Args:
        dim: width of the tokens.
        num_heads: number of heads.
        position: module that maps a `Grid` to `RelativeTerms`, such as `RelativePosition2d`; it may also be set later
            as the attribute `position`. None: plain attention.
        backend: see `relvit.ops.relative_attention`; an attribute that may be set at any time.
        **kwargs: see `timm.layers.Attention`.

    Raises:
        ValueError: an unknown backend.
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
        if position is not None:
            check_position(position)
        super().__init__(dim, num_heads, **kwargs)
        self.position = position
        self.backend = backend

    def forward(self, x: Tensor, grid: Grid, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """(B, N, dim) tokens laid out by `grid` -> (B, N, dim).

        Args:
            x: tokens, N = number of tokens of `grid`.
            grid: where they lie; its `valid` masks padding.
            attn_mask: see `relvit.ops.relative_attention`.
            is_causal: see `relvit.ops.relative_attention`.
        """
        B, N, _ = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        # Unbound where they lie, so that backward stacks the three gradients as the projection wants them: no copies.
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        # Under autocast a norm may return float32 where the value is in half precision.
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        terms: RelativeTerms | None = None
        if self.position is not None:
            terms = self.position(grid)
        if not torch.jit.is_scripting():
            show_weights(self.attn_drop, q, k, terms, grid, attn_mask, is_causal, self.scale)
        dropout_p = self.attn_drop.p if self.training else 0.0
        x = attend(q, k, v, terms, grid, attn_mask, is_causal, dropout_p, self.scale, self.backend)
        x = self.norm(x.transpose(1, 2).reshape(B, N, self.attn_dim))
        if gate is not None:
            x = x * gate
        return self.proj_drop(self.proj(x))


def check_position(position: object) -> None:
    """Raise TypeError for what is no position module: it is called once, with a grid of one patch."""
    if not isinstance(position, nn.Module):
        kind = f"the class {position.__name__}" if isinstance(position, type) else repr(position)
        raise TypeError(
            "a position must be a module from Grid to RelativeTerms, such as RelativePosition2d(head_dim, num_heads), "
            f"got {kind}"
        )
    try:
        terms = position(Grid(1, 1))
    except Exception as error:
        raise TypeError(f"position {type(position).__name__} cannot be called with a Grid: {error}") from error
    if not isinstance(terms, RelativeTerms):
        raise TypeError(f"position {type(position).__name__} must return RelativeTerms, got {type(terms).__name__}")
