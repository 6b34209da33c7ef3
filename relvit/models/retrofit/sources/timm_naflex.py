"""timm's `NaFlexVit` (images of any shapes, padded) after `relvit.retrofit`."""

from __future__ import annotations

from typing import Any, ClassVar

from timm.models.eva import EvaBlock
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block
from torch import Tensor

from relvit.layers.patch_embed import check_divisible
from relvit.models.retrofit.source import Classes, Exchange, Retrofitted, WholeImages
from relvit.models.retrofit.timm_attention import TIMM_ATTENTIONS, GridArgument
from relvit.ops import Grid, grid_from_naflex
from relvit.ops.grid import keep_patches


class RetrofittedNaFlexVit(Retrofitted, WholeImages, NaFlexVit):
    """timm's `NaFlexVit` after `relvit.retrofit`; the grid is passed with the attention mask.

    Attributes:
        max_grid: rows and columns of patches that no image of a NaFlex batch exceeds.
    """

    block_classes: ClassVar[Classes] = (Block, EvaBlock)
    attention_classes: ClassVar[Exchange] = TIMM_ATTENTIONS
    absolute: ClassVar[tuple[str, ...]] = ("embeds.pos_embed", "embeds.pos_embed_y", "embeds.pos_embed_x")
    max_grid: tuple[int, int] = (64, 64)

    def open_to_all_sizes(self) -> None:
        # timm's model takes all sizes already. If `abs_pos='drop'` has removed the absolute embedding, timm must not
        # look for it.
        if not self.state_dict().keys() & set(self.absolute):
            self.embeds.pos_embed_type = "none"

    def _forward_embeds(
        self, x: Tensor, patch_coord: Tensor | None, patch_valid: Tensor | None, attn_mask: Tensor | None
    ) -> dict[str, Any]:
        grid = self._image_grid(x) if patch_coord is None else self._batch_grid(patch_coord, patch_valid)
        embeds = super()._forward_embeds(x, patch_coord, patch_valid, attn_mask)
        if (kept := embeds["keep_indices"]) is not None:
            grid = keep_patches(grid, kept)
        embeds["attn_mask"] = GridArgument(grid, embeds["attn_mask"])
        return embeds

    def _image_grid(self, x: Tensor) -> Grid:
        if self.embeds.is_linear and not self.embeds.dynamic_img_pad:
            check_divisible(x.shape[-2:], self.embeds.patch_size)
        return Grid(*self.embeds.dynamic_feat_size(x.shape[-2:]), self.num_prefix_tokens)

    def _batch_grid(self, patch_coord: Tensor, patch_valid: Tensor | None) -> Grid:
        valid = None if patch_valid is None else patch_valid.bool()
        try:
            grid = grid_from_naflex(patch_coord, valid, *self.max_grid, self.num_prefix_tokens)
        except ValueError as error:
            rows, cols = self.max_grid
            raise ValueError(
                f"{error}; max_grid allows images of up to {rows} x {cols} patches: set model.max_grid, or give "
                "relvit.retrofit a larger max_grid"
            ) from error
        # timm passes a mask that hides the padding, so the grid need not say where the padding is.
        return grid._replace(valid=None)
