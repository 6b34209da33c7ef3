"""timm's BEiT, Swin, Swin V2 and `vit_relpos_*` after `relvit.retrofit`; `retrofit/bias.py` converts their tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from timm.models import checkpoint
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit
from timm.models.beit import Block as BeitBlock
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention, window_partition
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Block
from timm.models.swin_transformer_v2 import WindowAttention as WindowAttentionV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import (
    RelPosAttention,
    RelPosBlock,
    ResPostRelPosBlock,
    VisionTransformerRelPos,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from relvit.layers.patch_embed import GridPatchEmbed
from relvit.models.base import GridForward
from relvit.models.retrofit.bias import BiasPositions, set_window
from relvit.models.retrofit.source import Classes, Exchange, WholeImages, open_patch_embed
from relvit.models.retrofit.timm_attention import GridArgument
from relvit.models.retrofit.timm_relpos import (
    TimmRelativeBeit,
    TimmRelativeRelPos,
    TimmRelativeSwin,
    TimmRelativeSwinV2,
)
from relvit.ops import Grid
from relvit.ops.checks import integer
from relvit.ops.grid import once_per_raster


class GridInBias(BiasPositions, GridForward):
    """Mixin before timm's models whose blocks pass on a shared bias: here they pass on the grid in its place."""

    shared: ClassVar[tuple[str, ...]] = ("shared_rel_pos", "rel_pos_bias")
    # `GridForward` needs these attributes of timm's `VisionTransformer`, which BEiT and `vit_relpos_*` lack: its
    # `pool`, and `pool_native` for padded batches, read the two attributes below.
    pool: ClassVar[Callable[..., Tensor]] = VisionTransformer.pool
    attn_pool = None
    pool_include_prefix = False

    def open_to_all_sizes(self) -> None:
        open_patch_embed(self)
        for name in self.shared:
            setattr(self, name, None)
        for block in self.blocks:
            # timm's `Beit.set_input_size` resizes the tables of each attention that has a `window_size`. Set
            # `window_size` to None, because the tables have other names here.
            block.attn.window_size = None
        absent = {"pos_embed": None, "pos_drop": nn.Identity(), "patch_drop": nn.Identity(), "norm_pre": nn.Identity()}
        for name, value in absent.items():
            if not hasattr(self, name):
                setattr(self, name, value)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Set another size of images or patches as timm does, which resizes relative positions, too."""
        old = tuple(self.patch_embed.grid_size)
        super().set_input_size(img_size, patch_size)
        for position in dict.fromkeys(block.attn.position for block in self.blocks):
            set_window(position, old, tuple(self.patch_embed.grid_size))

    def windows(self) -> dict[str, tuple[int, int]]:
        return {"blocks": tuple(self.patch_embed.grid_size)}

    def _run_block(self, block: nn.Module, x: Tensor, grid: Grid, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        if is_causal:
            raise ValueError(f"{type(self).__name__} has no causal attention: give a causal attn_mask")
        argument = GridArgument(grid, attn_mask)
        return checkpoint(block, x, argument) if self.grad_checkpointing else block(x, argument)


class RetrofittedRelPos(GridInBias, VisionTransformerRelPos):
    """timm's `VisionTransformerRelPos` after `relvit.retrofit`."""

    block_classes: ClassVar[Classes] = (RelPosBlock, ResPostRelPosBlock)
    attention_classes: ClassVar[Exchange] = {RelPosAttention: TimmRelativeRelPos}


class RetrofittedBeit(GridInBias, Beit):
    """timm's `Beit` after `relvit.retrofit`."""

    block_classes: ClassVar[Classes] = (BeitBlock,)
    attention_classes: ClassVar[Exchange] = {BeitAttention: TimmRelativeBeit}


@once_per_raster
def shift_mask(
    grid: Grid, window: tuple[int, int], shift: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Make the mask of Swin's shifted windows, (windows, N, N): -100 for tokens that only the shift made neighbours."""
    # These booleans are True for rows and columns that the cyclic shift has moved across the border to the other side.
    rows, cols = (torch.arange(size, device=device) >= size - by for size, by in zip((*grid,)[:2], shift, strict=True))
    parts = (2 * rows[:, None] + cols)[None, :, :, None]
    parts = window_partition(parts, window).flatten(1)
    apart = parts[:, None] != parts[:, :, None]
    return torch.zeros(apart.shape, dtype=dtype, device=device).masked_fill(apart, -100.0)


class RemembersMask:
    """Mixin before timm's blocks of Swin, which would make the mask of shifted windows again for each image."""

    def get_attn_mask(self, x: Tensor) -> Tensor | None:
        """Return the mask for (B, rows, columns, dim) tokens; None where windows are not shifted."""
        if not any(self.shift_size):
            return None
        return shift_mask(Grid(x.shape[1], x.shape[2]), self.window_size, self.shift_size, x.dtype, x.device)


class RetrofittedSwinBlock(RemembersMask, SwinTransformerBlock):
    """timm's `SwinTransformerBlock` after `relvit.retrofit`."""


class RetrofittedSwinV2Block(RemembersMask, SwinTransformerV2Block):
    """timm's `SwinTransformerV2Block` after `relvit.retrofit`."""


SWIN_BLOCKS: Exchange = {SwinTransformerBlock: RetrofittedSwinBlock, SwinTransformerV2Block: RetrofittedSwinV2Block}


class SwinWindows(BiasPositions, WholeImages):
    """Mixin before timm's Swin Transformers, which cut windows of one size, and make masks for each image size."""

    num_prefix_tokens = 0

    def open_to_all_sizes(self) -> None:
        open_patch_embed(self, GridPatchEmbed)
        for _, block in self.named_blocks(self):
            block.__class__ = SWIN_BLOCKS[type(block)]
            block.dynamic_mask, block.attn_mask = True, None
            block.attn.set_window_size(block.window_size)

    def set_input_size(
        self,
        img_size: int | tuple[int, int] | None = None,
        patch_size: int | tuple[int, int] | None = None,
        window_size: int | Sequence[int | Sequence[int]] | None = None,
        **options: Any,
    ) -> None:
        """Set other sizes as timm does; TypeError or ValueError for windows that are not of whole patches."""
        # Check here: timm would notice a fraction only after it has changed a part of the model.
        for name, given in (("window_size", window_size), ("window_ratio", options.get("window_ratio"))):
            for size in () if given is None else tree_leaves(given):
                integer(name, size, 1)
        super().set_input_size(img_size, patch_size, window_size, **options)

    def windows(self) -> dict[str, tuple[int, int]]:
        return {name: tuple(block.window_size) for name, block in self.named_blocks(self)}


class RetrofittedSwin(SwinWindows, SwinTransformer):
    """timm's `SwinTransformer` after `relvit.retrofit`."""

    block_classes: ClassVar[Classes] = (SwinTransformerBlock,)
    attention_classes: ClassVar[Exchange] = {WindowAttention: TimmRelativeSwin}


class RetrofittedSwinV2(SwinWindows, SwinTransformerV2):
    """timm's `SwinTransformerV2` after `relvit.retrofit`."""

    block_classes: ClassVar[Classes] = (SwinTransformerV2Block,)
    attention_classes: ClassVar[Exchange] = {WindowAttentionV2: TimmRelativeSwinV2}

    def no_weight_decay(self) -> set[str]:
        """Return timm's names, and the names of all parameters of position modules."""
        return super().no_weight_decay() | {name for name, _ in self.named_parameters() if ".position." in name}
