"""Attention of retrofitted models: subclasses of timm's attention classes that add relative positions."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from relvit.layers.attention import GridAttention, attend_with
from relvit.ops import Grid, from_windows, to_windows
from relvit.ops.windows import exceeds_window


class GridArgument(NamedTuple):
    """A grid together with the argument of a timm block, `attn_mask` or `rope`, for which it is passed.

    timm's blocks hand both on untouched, so the grid reaches every attention explicitly, and no block needs a class of
    its own.
    """

    grid: Grid
    argument: Tensor | None


class TimmRelativeAttention(GridAttention):
    """Mixin before one of timm's attention modules: relative terms between its projections.

    All parameters and options are timm's, plus a position module; queries and keys are those that come out of `q_norm`
    and `k_norm`, see `relvit.layers.attention.attend_with`.

    Attributes:
        num_kv_groups: query heads that share a head of keys and values.
    """

    num_kv_groups: int = 1

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
        rotate = None if rope is None else partial(_rotate, rope=rope, half=self.rotate_half)
        options = {"rotate": rotate, "attn_mask": attn_mask, "is_causal": is_causal}
        mixed = attend_with(self, x, self._project(x), grid, **options)
        out = self.norm(mixed.transpose(1, 2).flatten(2))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values (B, heads, N, head_dim) of (B, N, dim) tokens."""
        if self.qkv is None:
            projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
            parts = [part.unflatten(-1, (-1, self.head_dim)) for part in projected]
        elif getattr(self, "q_bias", None) is None:
            parts = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        else:
            # timm's `EvaAttention`, whose keys have no trained bias.
            bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
            qkv = self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)
            parts = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        query, key = self.q_norm(query), self.k_norm(key)
        if (group := self.num_kv_groups) > 1:
            key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        return query, key, value


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


def _rotate(x: Tensor, grid: Grid, rope: Tensor, half: bool) -> Tensor:
    """Rotate the patches of (B, heads, N, head_dim); prefix tokens stay as they are."""
    prefix = grid.prefix
    return torch.cat((x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)), dim=2)
