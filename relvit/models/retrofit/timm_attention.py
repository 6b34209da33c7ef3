"""Retrofitted attention of timm's plain ViTs and Eva; projections with key biases or LoRA; BEiT: `timm_relpos.py`."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from relvit.layers.attention import GridAttention, Projected, has_hooks
from relvit.ops import Grid


class GridArgument(NamedTuple):
    """A grid together with the argument of a timm block, `attn_mask` or `rope`, for which it is passed.

    relvit calls timm's blocks with a `GridArgument` in place of this argument. The blocks pass on the `GridArgument`
    unchanged, so the grid reaches every attention although relvit replaces no block.
    """

    grid: Grid
    argument: Tensor | None


class TimmRelativeAttention(GridAttention):
    """Mixin before one of timm's attention modules: relative terms between its projections, see `attend_with`.

    Parameters and options stay the same as in timm's module. A position module is added, whose tables are multiplied by
    queries and keys after the norms of queries and keys.
    """

    num_kv_groups: int = 1  # number of query heads that share a head of keys and values

    def forward(
        self,
        x: Tensor,
        rope: GridArgument | Tensor | None = None,
        attn_mask: GridArgument | Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Map (B, N, dim) tokens to (B, N, dim).

        Args:
            rope: sines and cosines of the patches, (..., N - prefix, 2 head_dim).
            attn_mask, is_causal: see `relvit.ops.relative_attention`. Either `rope` or `attn_mask` is a `GridArgument`.

        Raises:
            TypeError: neither `rope` nor `attn_mask` is a `GridArgument`, for example because the layer is called
                directly and not by its model.
        """
        grid, rope, attn_mask = _split_arguments(rope, attn_mask)
        assert rope is None or self.window is None, "set_reach cuts no windows in models with a rotary embedding"
        rotate = None if rope is None else partial(_rotate, rope=rope, half=self.rotate_half)
        return self.attend(x, grid, attn_mask, is_causal, rotate)

    def project(self, x: Tensor) -> Projected:
        """Compute queries, keys and values of (B, N, dim) tokens."""
        qkv = self._modules.get("qkv")
        if qkv is None:
            projections = (self.q_proj, self.k_proj, self.v_proj)
            parts = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in projections)
            query, key, value = self.heads(tuple(parts))
            if (group := self.num_kv_groups) > 1:
                key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
            return query, key, value
        if getattr(self, "q_bias", None) is None:
            return super().project(x)
        # In timm's `EvaAttention`, BEiT and Swin V2 the bias of keys is not trained, so the layer `qkv` has no bias:
        # join the biases of queries, keys and values.
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        if type(qkv) is nn.Linear and not has_hooks(qkv):
            projected = F.linear(x, qkv.weight, bias)
        else:
            # A module that has replaced `qkv`, such as a LoRA adapter, may compute more than a product: call it.
            projected = qkv(x)
            projected = projected + bias.to(projected.dtype)
        # Use `view`, because `unflatten` and `split` are Python functions, and calling them takes longer than a `view`.
        return self.heads(projected.view(x.shape[0], x.shape[1], 3 * self.num_heads, self.head_dim))


class TimmRelativePlain(TimmRelativeAttention, Attention):
    """timm's `Attention` after a retrofit, see `TimmRelativeAttention`."""

    def project(self, x: Tensor) -> Projected:
        """Compute queries, keys and values of (B, N, dim) tokens by one projection with one bias."""
        # The method of the base class would look up the separate biases of other models, which takes as long as an
        # operation on tensors.
        return GridAttention.project(self, x)


class TimmRelativeRope(TimmRelativeAttention, AttentionRope):
    """timm's `AttentionRope` after a retrofit, see `TimmRelativeAttention`; key and value heads may be fewer."""


class TimmRelativeEva(TimmRelativeAttention, EvaAttention):
    """timm's `EvaAttention` after a retrofit, see `TimmRelativeAttention`."""


# `TIMM_ATTENTIONS` maps each class of timm's attention to the class that `relvit.retrofit` gives to its modules.
TIMM_ATTENTIONS: dict[type[nn.Module], type[nn.Module]] = {
    Attention: TimmRelativePlain,
    AttentionRope: TimmRelativeRope,
    EvaAttention: TimmRelativeEva,
}


def _split_arguments(
    rope: GridArgument | Tensor | None, attn_mask: GridArgument | Tensor | None
) -> tuple[Grid, Tensor | None, Tensor | None]:
    """Return the grid, and `rope` and `attn_mask` without it."""
    if isinstance(rope, GridArgument):
        return rope.grid, rope.argument, attn_mask
    if isinstance(attn_mask, GridArgument):
        return attn_mask.grid, rope, attn_mask.argument
    raise TypeError(
        "retrofitted attention needs the grid, which the model gives its blocks: call its forward_features or "
        "forward_intermediates instead of its blocks, or give rope=GridArgument(grid, rope) or "
        f"attn_mask=GridArgument(grid, attn_mask); got rope of type {type(rope).__name__} and attn_mask of type "
        f"{type(attn_mask).__name__}"
    )


def _rotate(x: Tensor, grid: Grid, rope: Tensor, half: bool) -> Tensor:
    """Rotate the patches of (B, heads, N, head_dim); prefix tokens stay as they are."""
    prefix = grid.prefix
    return torch.cat((x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)), dim=2)
