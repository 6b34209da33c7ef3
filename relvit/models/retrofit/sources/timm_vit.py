"""timm's `VisionTransformer` (DINOv2, CLIP, SigLIP ...) and distilled DeiT after `relvit.retrofit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from timm.layers import PatchDropout, PatchDropoutWithIndices
from timm.models import checkpoint
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, ResPostBlock, VisionTransformer
from torch import Tensor, nn

from relvit.models.absolute import TimmAbsoluteEmbedding
from relvit.models.base import GridForward
from relvit.models.retrofit.source import Classes, Exchange, Retrofitted, open_patch_embed
from relvit.models.retrofit.timm_attention import TIMM_ATTENTIONS, GridArgument
from relvit.ops import Grid


class RetrofittedVisionTransformer(Retrofitted, TimmAbsoluteEmbedding, GridForward, VisionTransformer):
    """timm's `VisionTransformer` after `relvit.retrofit`; the grid is passed with the attention mask."""

    block_classes: ClassVar[Classes] = (Block, ResPostBlock)
    attention_classes: ClassVar[Exchange] = TIMM_ATTENTIONS

    def open_to_all_sizes(self) -> None:
        open_patch_embed(self)
        if isinstance(self.patch_drop, PatchDropout):
            # timm's `PatchDropout` does not return which patches it kept, so the coordinates of the patches would be
            # lost.
            self.patch_drop.__class__ = PatchDropoutWithIndices
            # timm does not count the distillation token as a prefix token here, and so could drop it: set the right
            # number.
            self.patch_drop.num_prefix_tokens = self.num_prefix_tokens

    def _run_block(self, block: nn.Module, x: Tensor, grid: Grid, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        argument = GridArgument(grid, attn_mask)
        if self.grad_checkpointing:
            # Pass no keyword arguments: reentrant checkpointing (timm's `set_reentrant_ckpt`) takes none.
            return checkpoint(block, x, argument, is_causal)
        return block(x, attn_mask=argument, is_causal=is_causal)


class RetrofittedVisionTransformerDistilled(RetrofittedVisionTransformer, VisionTransformerDistilled):
    """timm's `VisionTransformerDistilled` after `relvit.retrofit`."""

    forward_head: ClassVar[Callable[..., Tensor]] = VisionTransformerDistilled.forward_head
