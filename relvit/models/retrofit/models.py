"""Retrofitted models: timm's Vision Transformers, EVA and NaFlexVit, which make the grid and pass it to attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from timm.layers import Format, PatchDropout, PatchDropoutWithIndices, PatchEmbed, apply_keep_indices_nlc
from timm.models import checkpoint
from timm.models.beit import Beit
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import Tensor, nn

from relvit.layers import interpolate
from relvit.layers.patch_embed import AnySizePatchEmbed, GridPatchEmbed, check_divisible
from relvit.layers.positions.rope import ANY_SIZE_ROPES
from relvit.layers.timm_attention import GridArgument
from relvit.models.base import GridForward, NoTorchScript, TablesWithoutDecay
from relvit.models.retrofit.beit_sam_swin import SHARED
from relvit.ops import Grid, grid_from_naflex, patch_coords


class Retrofitted(NoTorchScript, TablesWithoutDecay):
    """Mixin before one of timm's models: its attention modules are `TimmRelativeAttention`, which it hands the grid.

    Every class has a method `open_to_all_sizes`, which lets images of every size in; `relvit.retrofit` calls it once.
    """


class RetrofittedVisionTransformer(Retrofitted, GridForward, VisionTransformer):
    """timm's `VisionTransformer` after `relvit.retrofit`."""

    def open_to_all_sizes(self) -> None:
        _open_patch_embed(self)
        if isinstance(self.patch_drop, PatchDropout):
            # timm's own discards which patches stayed, and with them their coordinates.
            self.patch_drop.__class__ = PatchDropoutWithIndices
            # timm counts the distillation token among the patches.
            self.patch_drop.num_prefix_tokens = self.num_prefix_tokens

    def _run_block(self, block: nn.Module, x: Tensor, grid: Grid, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        argument = GridArgument(grid, attn_mask)
        if self.grad_checkpointing:
            return checkpoint(block, x, attn_mask=argument, is_causal=is_causal)
        return block(x, attn_mask=argument, is_causal=is_causal)


class RetrofittedVisionTransformerDistilled(RetrofittedVisionTransformer, VisionTransformerDistilled):
    """timm's `VisionTransformerDistilled` after `relvit.retrofit`."""

    forward_head: ClassVar[Callable[..., Tensor]] = VisionTransformerDistilled.forward_head

    def _pos_embed(self, x: Tensor) -> Tensor:
        if self.pos_embed is not None:
            return super()._pos_embed(x)
        # timm's own needs an embedding.
        prefix = (token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.dist_token))
        return torch.cat((*prefix, x.flatten(1, 2)), dim=1)


class DeferredPatchDropout(PatchDropoutWithIndices):
    """timm's patch dropout for a model that discards which patches stayed: drops only where `drop` is called."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None

    def drop(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Drop some of (B, N, dim) tokens; return those that stay and the index of their patches, (B, K), None: all."""
        return super().forward(x)


class RetrofittedEva(Retrofitted, Eva):
    """timm's `Eva` after `relvit.retrofit`; the grid is passed with the rotary embedding."""

    def open_to_all_sizes(self) -> None:
        _open_patch_embed(self)
        if type(self.rope) in ANY_SIZE_ROPES:
            self.rope.__class__ = ANY_SIZE_ROPES[type(self.rope)]
        if self.patch_drop is not None:
            self.patch_drop.__class__ = DeferredPatchDropout

    def _pos_embed(self, x: Tensor) -> tuple[Tensor, GridArgument | list[GridArgument]]:
        """timm's, but with the grid in the `rope` of the blocks: one for each block, or one for all."""
        grid = Grid(x.shape[1], x.shape[2], self.num_prefix_tokens)
        x, rope = super()._pos_embed(x)
        mixed = self.rope_mixed and rope is not None
        if self.patch_drop is not None:
            x, kept = self.patch_drop.drop(x)
            if kept is not None:
                grid = grid._replace(coords=patch_coords(grid, x.device)[kept])
                if rope is not None:
                    rope = apply_keep_indices_nlc(x, rope, kept)
                    # To (depth, B, heads, N, dim) where each block has its own, (B, 1, N, dim) where heads share it.
                    rope = rope.transpose(0, 1) if mixed else rope.unsqueeze(1)
        if mixed:
            return x, [GridArgument(grid, rope[index]) for index in range(len(self.blocks))]
        return x, GridArgument(grid, rope)


class RetrofittedNaFlexVit(Retrofitted, NaFlexVit):
    """timm's `NaFlexVit` after `relvit.retrofit`; the grid is passed with the attention mask.

    Attributes:
        max_grid: rows and columns of patches that no image of a NaFlex batch exceeds.
    """

    max_grid: tuple[int, int]

    def open_to_all_sizes(self) -> None:
        """Do nothing: timm's `NaFlexVit` takes all sizes."""

    def _forward_embeds(
        self, x: Tensor, patch_coord: Tensor | None, patch_valid: Tensor | None, attn_mask: Tensor | None
    ) -> dict[str, Any]:
        grid = self._image_grid(x) if patch_coord is None else self._batch_grid(patch_coord, patch_valid)
        embeds = super()._forward_embeds(x, patch_coord, patch_valid, attn_mask)
        if (kept := embeds["keep_indices"]) is not None:
            coords = patch_coords(grid, kept.device)
            coords = coords.expand(len(kept), -1, 2).gather(1, kept[..., None].expand(-1, -1, 2))
            grid = grid._replace(coords=coords)
        embeds["attn_mask"] = GridArgument(grid, embeds["attn_mask"])
        return embeds

    def _image_grid(self, x: Tensor) -> Grid:
        if self.embeds.is_linear and not self.embeds.dynamic_img_pad:
            check_divisible(x, self.embeds.patch_size)
        return Grid(*self.embeds.dynamic_feat_size(x.shape[-2:]), self.num_prefix_tokens)

    def _batch_grid(self, patch_coord: Tensor, patch_valid: Tensor | None) -> Grid:
        valid = None if patch_valid is None else patch_valid.bool()
        try:
            grid = grid_from_naflex(patch_coord, valid, *self.max_grid, self.num_prefix_tokens)
        except ValueError as error:
            rows, cols = self.max_grid
            raise ValueError(
                f"{error}; images of up to {rows} x {cols} patches are allowed by max_grid, an argument of "
                "relvit.retrofit and an attribute of the model"
            ) from error
        # Padding is masked by timm's own mask.
        return grid._replace(valid=None)


class GridInBias(Retrofitted, GridForward):
    """Mixin before timm's models whose blocks hand on a shared bias, in place of which they are handed the grid."""

    # What `pool` and padded batches read.
    pool: ClassVar[Callable[..., Tensor]] = VisionTransformer.pool
    attn_pool = None
    pool_include_prefix = False

    def open_to_all_sizes(self) -> None:
        _open_patch_embed(self)
        for name in SHARED:
            setattr(self, name, None)
        absent = {"pos_embed": None, "pos_drop": nn.Identity(), "patch_drop": nn.Identity(), "norm_pre": nn.Identity()}
        for name, value in absent.items():
            if not hasattr(self, name):
                setattr(self, name, value)

    def _pos_embed(self, x: Tensor) -> Tensor:
        size, x = (x.shape[1], x.shape[2]), x.flatten(1, 2)
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        if self.pos_embed is None:
            return x
        prefix = self.num_prefix_tokens
        return self.pos_drop(
            x + interpolate.resample_embedding(self.pos_embed, self.patch_embed.grid_size, size, prefix)
        )

    def _run_block(self, block: nn.Module, x: Tensor, grid: Grid, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        if is_causal:
            raise ValueError(f"{type(self).__name__} has no causal attention: give it as attn_mask")
        argument = GridArgument(grid, attn_mask)
        return checkpoint(block, x, argument) if self.grad_checkpointing else block(x, argument)


class RetrofittedRelPos(GridInBias, VisionTransformerRelPos):
    """timm's `VisionTransformerRelPos` after `relvit.retrofit`."""


class RetrofittedBeit(GridInBias, Beit):
    """timm's `Beit` after `relvit.retrofit`."""


class RetrofittedSam(Retrofitted, VisionTransformerSAM):
    """timm's `VisionTransformerSAM` after `relvit.retrofit`; blocks cut windows as before, zeros around the image."""

    num_prefix_tokens = 0

    def open_to_all_sizes(self) -> None:
        _open_patch_embed(self, GridPatchEmbed)
        for block in self.blocks:
            if block.window_size:
                block.attn.block_window = (block.window_size,) * 2


class SwinWindows(Retrofitted):
    """Mixin before timm's Swin Transformers, which cut windows of one size, and make masks for the image at hand."""

    num_prefix_tokens = 0

    def open_to_all_sizes(self) -> None:
        _open_patch_embed(self, GridPatchEmbed)
        for block in (block for stage in self.layers for block in stage.blocks):
            block.dynamic_mask, block.attn_mask = True, None
            block.attn.set_window_size(block.window_size)


class RetrofittedSwin(SwinWindows, SwinTransformer):
    """timm's `SwinTransformer` after `relvit.retrofit`."""


class RetrofittedSwinV2(SwinWindows, SwinTransformerV2):
    """timm's `SwinTransformerV2` after `relvit.retrofit`."""

    def no_weight_decay(self) -> set[str]:
        """Return timm's names, among them the networks of positions."""
        return super().no_weight_decay() | {name for name, _ in self.named_parameters() if ".position." in name}


# timm's class -> the one that a model of it becomes.
RETROFITTED: dict[type[nn.Module], type[Retrofitted]] = {
    VisionTransformer: RetrofittedVisionTransformer,
    VisionTransformerDistilled: RetrofittedVisionTransformerDistilled,
    Eva: RetrofittedEva,
    NaFlexVit: RetrofittedNaFlexVit,
}
# The same for models that bring relative positions of their own.
IMPORTED: dict[type[nn.Module], type[Retrofitted]] = {
    VisionTransformerRelPos: RetrofittedRelPos,
    Beit: RetrofittedBeit,
    VisionTransformerSAM: RetrofittedSam,
    SwinTransformer: RetrofittedSwin,
    SwinTransformerV2: RetrofittedSwinV2,
}


def _open_patch_embed(model: nn.Module, becomes: type[AnySizePatchEmbed] = AnySizePatchEmbed) -> None:
    """Do what timm's `dynamic_img_size=True` does in the constructor."""
    embed = model.patch_embed
    model.dynamic_img_size = True
    embed.flatten, embed.output_fmt, embed.strict_img_size = False, Format.NHWC, False
    if type(embed) is PatchEmbed:
        embed.__class__ = becomes
        if any(size % patch for size, patch in zip(embed.img_size, embed.patch_size, strict=True)):
            # As before, what remains of the model's own size is left out.
            embed.cropped_size = tuple(embed.img_size)
    # timm's transforms read whether other sizes are allowed.
    model._traits = {**getattr(model, "_traits", {}), "fixed_input_size": False}
