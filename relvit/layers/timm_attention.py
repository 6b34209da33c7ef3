"""Attention of retrofitted models: subclasses of timm's attention classes that add relative positions."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from relvit.layers.attention_weights import show_weights
from relvit.ops import Grid, RelativeTerms, from_windows, relative_attention, to_windows
from relvit.ops.terms import add_channels
from relvit.ops.windows import exceeds_window


class GridArgument(NamedTuple):
    """A grid together with the argument of a timm block, `attn_mask` or `rope`, for which it is passed.

    timm's blocks hand both on untouched, so the grid reaches every attention explicitly, and no block needs a class of
    its own.
    """

    grid: Grid
    argument: Tensor | None


class TimmRelativeAttention:
    """Mixin before one of timm's attention modules: relative terms between its projections.

    All parameters and options are timm's, plus a position module. With q and k as they come out of `q_norm` and
    `k_norm`, and R the rotary embedding, where there is one,

        logit_ij = scale * (R q_i . R k_j + q_i . a^K_ij + k_j . a^Q_ij) + b_ij

    Attributes:
        position: module that maps a `Grid` to `RelativeTerms`, such as `RelativePosition2d`.
        backend: see `relvit.ops.relative_attention`.
        prefix_bias: `PrefixBias`, where there is one.
        num_kv_groups: query heads that share a head of keys and values.
        trained_keys: see `relvit.ops.relative_attention`; `relvit.models.set_reach` sets it.
        window: rows and columns of patches; on larger grids tokens attend within windows of this size. None: to all.
        block_window: rows and columns of the windows that the block around it cuts, whatever the image. None: it cuts
            none.
    """

    position: nn.Module
    backend: str
    block_window: tuple[int, int] | None = None
    num_kv_groups: int = 1
    trained_keys: int | None = None
    window: tuple[int, int] | None = None

    def forward(
        self,
        x: Tensor,
        rope: GridArgument | Tensor | None = None,
        attn_mask: GridArgument | Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Map (B, N, dim) tokens to (B, N, dim).

        Args:
            x: tokens of the grid.
            rope: sines and cosines of the patches, (..., N - prefix, 2 head_dim).
            attn_mask: see `relvit.ops.relative_attention`.
            is_causal: see `relvit.ops.relative_attention`.

        Raises:
            TypeError: neither `rope` nor `attn_mask` is a `GridArgument`: the model around is not retrofitted.
        """
        grid, rope, attn_mask = _split_arguments(rope, attn_mask)
        if exceeds_window(grid, self.window, attn_mask, is_causal):
            if rope is not None:
                raise ValueError("attention in windows has no rotary embedding")
            windows, inner = to_windows(x, grid, self.window)
            found = TimmRelativeAttention.forward(self, windows, attn_mask=GridArgument(inner, None))
            return from_windows(found, grid, self.window)
        tokens = x
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        query, key, value = self._project(x)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        query, key = self.q_norm(query), self.k_norm(key)
        if hasattr(self.position, "content_bias"):
            # Transformer-XL's u.
            query = query + self.position.content_bias[:, None].to(query.dtype)
        position_query = position_key = None
        if rope is not None:
            # Tables act on vectors that are not rotated: those do not depend on a token's own coordinates. As in timm,
            # norms that return float32 under autocast are rotated in float32.
            position_query, position_key = query.to(value.dtype), key.to(value.dtype)
            query, key = (_rotate(part, rope, grid.prefix, self.rotate_half) for part in (query, key))
        query, key = query.to(value.dtype), key.to(value.dtype)
        if (group := self.num_kv_groups) > 1:
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
            position_key = None if position_key is None else position_key.repeat_interleave(group, dim=1)
        terms = self.relative_terms(tokens, grid)
        options = {
            "attn_mask": attn_mask,
            "is_causal": is_causal,
            "scale": self.scale,
            "trained_keys": self.trained_keys,
            "position_query": position_query,
            "position_key": position_key,
        }
        show_weights(self.attn_drop, query, key, terms, grid, **options)
        dropout_p = self.attn_drop.p if self.training else 0.0
        x = relative_attention(query, key, value, terms, grid, dropout_p=dropout_p, backend=self.backend, **options)
        x = self.norm(x.transpose(1, 2).flatten(2))
        if gate is not None:
            x = x * gate
        return self.proj_drop(self.proj(x))

    def relative_terms(self, x: Tensor, grid: Grid) -> RelativeTerms:
        """Compute the terms for tokens `x`, (B, N, dim) of `grid`."""
        terms = self.position.terms(x, grid, grid) if hasattr(self.position, "terms") else self.position(grid)
        # No attribute of the class, which would hide the module.
        return add_channels(terms, self.prefix_bias(grid, grid)) if hasattr(self, "prefix_bias") else terms

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries (B, N, heads, head_dim), keys and values, which may have fewer heads."""
        if self.qkv is None:
            parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
            return tuple(part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if getattr(self, "q_bias", None) is None:
            qkv = self.qkv(x)
        else:
            # timm's `EvaAttention`, whose keys have no trained bias.
            bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
            qkv = self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)
        return qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)


class TimmRelativePlain(TimmRelativeAttention, Attention):
    """timm's `Attention` after a retrofit, see `TimmRelativeAttention`."""


class TimmRelativeRope(TimmRelativeAttention, AttentionRope):
    """timm's `AttentionRope` after a retrofit, see `TimmRelativeAttention`; key and value heads may be fewer."""


class TimmRelativeEva(TimmRelativeAttention, EvaAttention):
    """timm's `EvaAttention` after a retrofit, see `TimmRelativeAttention`."""


# timm's class -> the one that a module of it becomes.
TIMM_ATTENTIONS: dict[type[nn.Module], type[nn.Module]] = {
    Attention: TimmRelativePlain,
    AttentionRope: TimmRelativeRope,
    EvaAttention: TimmRelativeEva,
}


def _split_arguments(
    rope: GridArgument | Tensor | None, attn_mask: GridArgument | Tensor | None
) -> tuple[Grid, Tensor | None, Tensor | None]:
    """The grid, and `rope` and `attn_mask` without it."""
    if isinstance(rope, GridArgument):
        return rope.grid, rope.argument, attn_mask
    if isinstance(attn_mask, GridArgument):
        return attn_mask.grid, rope, attn_mask.argument
    raise TypeError(
        "retrofitted attention needs the grid, as rope=GridArgument(grid, rope) or attn_mask=GridArgument(grid, "
        f"attn_mask); got rope of type {type(rope).__name__} and attn_mask of type {type(attn_mask).__name__}"
    )


def _rotate(x: Tensor, rope: Tensor, prefix: int, half: bool) -> Tensor:
    """Rotate the patches of (B, heads, N, head_dim); prefix tokens stay as they are."""
    return torch.cat((x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)), dim=2)
