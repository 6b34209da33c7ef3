"""timm's `Eva` (EVA, EVA-02, DINOv3, rotary Vision Transformers) after `relvit.retrofit`."""

from __future__ import annotations

from typing import ClassVar

from timm.layers import apply_keep_indices_nlc
from timm.models.eva import Eva, EvaBlock, EvaBlockPostNorm
from torch import Tensor

from relvit.layers.positions.rope import ANY_SIZE_ROPES
from relvit.models.absolute import TimmAbsoluteEmbedding
from relvit.models.retrofit.source import Classes, Exchange, Retrofitted, WholeImages, open_patch_embed
from relvit.models.retrofit.timm_attention import TIMM_ATTENTIONS, GridArgument
from relvit.ops import Grid
from relvit.ops.grid import keep_patches


class RetrofittedEva(Retrofitted, WholeImages, TimmAbsoluteEmbedding, Eva):
    """timm's `Eva` after `relvit.retrofit`; the grid is passed with the rotary embedding."""

    block_classes: ClassVar[Classes] = (EvaBlock, EvaBlockPostNorm)
    attention_classes: ClassVar[Exchange] = TIMM_ATTENTIONS

    def open_to_all_sizes(self) -> None:
        open_patch_embed(self)
        if type(self.rope) in ANY_SIZE_ROPES:
            self.rope.__class__ = ANY_SIZE_ROPES[type(self.rope)]

    def _pos_embed(self, x: Tensor) -> tuple[Tensor, GridArgument | list[GridArgument]]:
        """Embed tokens as timm does, and put the grid into the blocks' `rope`: one for each block, or one for all."""
        grid = Grid(x.shape[1], x.shape[2], self.num_prefix_tokens)
        rope = None if self.rope is None else self.rope.get_embed(shape=(grid.height, grid.width))
        x = self.pos_drop(self.embed_tokens(x))
        mixed = self.rope_mixed and rope is not None
        if self.patch_drop is not None:
            x, kept = self.patch_drop(x)
            if kept is not None:
                grid = keep_patches(grid, kept)
                if rope is not None:
                    rope = apply_keep_indices_nlc(x, rope, kept)
                    # The shape of `rope` becomes (depth, B, heads, N, dim) if each block has its own rotation,
                    # otherwise (B, 1, N, dim).
                    rope = rope.transpose(0, 1) if mixed else rope.unsqueeze(1)
        if mixed:
            return x, [GridArgument(grid, rope[index]) for index in range(len(self.blocks))]
        return x, GridArgument(grid, rope)
