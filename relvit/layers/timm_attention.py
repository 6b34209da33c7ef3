"""timm's attention modules with relative positions; the grid comes with an argument that blocks pass through."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from relvit.layers.attention_weights import show_weights
from relvit.ops import Grid, relative_attention


class Placed(NamedTuple):
    """What travels through a timm block to its attention in the place of one of its arguments, `attn_mask` or `rope`.

    timm's blocks hand both on untouched, so the grid reaches every attention explicitly, and no block needs a class of
    its own.

    Attributes:
        grid: where the tokens lie.
        argument: the argument in whose place it travels, as timm has it.
    """

    grid: Grid
    argument: Tensor | None


class PlacedAttention:
    """Mixin before one of timm's attention modules: relative terms between its projections.

    All parameters and options are timm's, plus a position module. With q and k as they come out of `q_norm` and
    `k_norm`, and R the rotary embedding, where there is one,

        logit_ij = scale * (R q_i . R k_j + q_i . a^K_ij + k_j . a^Q_ij) + b_ij

    Tables meet vectors that are not rotated yet, because these do not depend on where a token lies by itself.

    Attributes:
        position: module that maps a `Grid` to `RelativeTerms`, such as `RelativePosition2d`.
        backend: see `relvit.ops.relative_attention`.
        num_kv_groups: query heads that share a head of keys and values.
    """

    position: nn.Module
    backend: str
    num_kv_groups: int = 1

    def forward(
        self,
        x: Tensor,
        rope: Placed | Tensor | None = None,
        attn_mask: Placed | Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """(B, N, dim) tokens -> (B, N, dim).

        Args:
            x: tokens, N = number of tokens of the grid.
            rope: sines and cosines of the patches, (..., N - prefix, 2 head_dim).
            attn_mask: see `relvit.ops.relative_attention`.
            is_causal: see `relvit.ops.relative_attention`.

        Raises:
            TypeError: neither `rope` nor `attn_mask` is `Placed`: the model around was not told of the retrofit.
        """
        grid, rope, attn_mask = _unpack(rope, attn_mask)
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        query, key, value = self._project(x)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        query, key = self.q_norm(query), self.k_norm(key)
        # As in timm, norms that return float32 under autocast are rotated in float32.
        position_query, position_key = query.to(value.dtype), key.to(value.dtype)
        if rope is not None:
            query, key = (_rotate(part, rope, grid.prefix, self.rotate_half) for part in (query, key))
        query, key = query.to(value.dtype), key.to(value.dtype)
        if (group := self.num_kv_groups) > 1:
            key, value, position_key = (p.repeat_interleave(group, dim=1) for p in (key, value, position_key))
        if rope is None:
            position_query = position_key = None
        terms = self.position(grid)
        options = (attn_mask, is_causal, self.scale, position_query, position_key)
        show_weights(self.attn_drop, query, key, terms, grid, *options)
        x = relative_attention(
            query,
            key,
            value,
            terms,
            grid,
            position_query=position_query,
            position_key=position_key,
            attn_mask=attn_mask,
            is_causal=is_causal,
            dropout_p=self.attn_drop.p if self.training else 0.0,
            scale=self.scale,
            backend=self.backend,
        )
        x = self.norm(x.transpose(1, 2).flatten(2))
        if gate is not None:
            x = x * gate
        return self.proj_drop(self.proj(x))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries (B, N, heads, head_dim), keys and values, which may have fewer heads."""
        if self.qkv is None:
            parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
            return tuple(part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return self._project_at_once(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)

    def _project_at_once(self, x: Tensor) -> Tensor:
        return self.qkv(x)


class PlacedPlainAttention(PlacedAttention, Attention):
    """timm's `Attention` with relative positions, see `PlacedAttention`."""


class PlacedRopeAttention(PlacedAttention, AttentionRope):
    """timm's `AttentionRope` with relative positions, see `PlacedAttention`; key and value heads may be fewer."""


class PlacedEvaAttention(PlacedAttention, EvaAttention):
    """timm's `EvaAttention` with relative positions, see `PlacedAttention`; its keys have no trained bias."""

    def _project_at_once(self, x: Tensor) -> Tensor:
        if self.q_bias is None:
            return self.qkv(x)
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        return self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)


# timm's class -> the one that a module of it becomes.
PLACED_ATTENTIONS: dict[type[nn.Module], type[nn.Module]] = {
    Attention: PlacedPlainAttention,
    AttentionRope: PlacedRopeAttention,
    EvaAttention: PlacedEvaAttention,
}


def _unpack(
    rope: Placed | Tensor | None, attn_mask: Placed | Tensor | None
) -> tuple[Grid, Tensor | None, Tensor | None]:
    """The grid and what is meant by `rope` and `attn_mask`."""
    if isinstance(rope, Placed):
        return rope.grid, rope.argument, attn_mask
    if isinstance(attn_mask, Placed):
        return attn_mask.grid, rope, attn_mask.argument
    raise TypeError(
        "retrofitted attention needs the grid, as rope=Placed(grid, rope) or attn_mask=Placed(grid, attn_mask); got "
        f"rope of type {type(rope).__name__} and attn_mask of type {type(attn_mask).__name__}"
    )


def _rotate(x: Tensor, rope: Tensor, prefix: int, half: bool) -> Tensor:
    """Rotate the patches of (B, heads, N, head_dim); prefix tokens stay as they are."""
    return torch.cat((x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)), dim=2)
