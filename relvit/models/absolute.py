"""Add prefix tokens and a learned absolute embedding, mirrored, or resized (in retrofitted models as timm does)."""

from __future__ import annotations

import torch
from timm.layers import pos_embed as timm_pos_embed
from torch import Tensor

from relvit.layers import interpolate


class AbsoluteEmbedding:
    """Mixin before one of timm's models: adds its `pos_embed`, a parameter or None, to images of every size."""

    # `relvit.models.set_reach` sets this attribute to the rows and columns of the grid in training; on larger grids the
    # embedding is then mirrored at its edges. If it is None, the embedding is interpolated to the grid of the image.
    mirrored_grid: tuple[int, int] | None = None
    no_embed_class: bool = False  # whether prefix tokens have no entry in the embedding

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Set another size of images or patches as timm, which interpolates the embedding to this size."""
        embed, mirrored = self.patch_embed, self.mirrored_grid
        follows = mirrored is not None and mirrored == embed.dynamic_feat_size(embed.img_size)
        super().set_input_size(img_size, patch_size)
        if follows:
            # Mirror the new embedding, because `_fitted` would interpolate it back to the old grid.
            self.mirrored_grid = embed.dynamic_feat_size(embed.img_size)

    def embed_tokens(self, x: Tensor) -> Tensor:
        """Turn patches (B, rows, columns, dim) into tokens (B, N, dim): prefix tokens first, the embedding added."""
        size, x = (x.shape[1], x.shape[2]), x.flatten(1, 2)
        tokens = (getattr(self, name, None) for name in ("cls_token", "dist_token", "reg_token"))
        first = [token.expand(x.shape[0], -1, -1) for token in tokens if token is not None]
        if self.pos_embed is None:
            return torch.cat((*first, x), dim=1)
        if self.no_embed_class:
            return torch.cat((*first, x + self._fitted(size, 0)), dim=1)
        return torch.cat((*first, x), dim=1) + self._fitted(size, self.num_prefix_tokens)

    def _fitted(self, size: tuple[int, int], prefix: int) -> Tensor:
        if self.mirrored_grid is None:
            return self._interpolated(size, prefix)
        inner = self._interpolated(self.mirrored_grid, prefix)
        return interpolate.resample_embedding(inner, self.mirrored_grid, size, prefix, mirror=True)

    def _interpolated(self, size: tuple[int, int], prefix: int) -> Tensor:
        return interpolate.resample_embedding(self.pos_embed, self.patch_embed.grid_size, size, prefix)


class TimmAbsoluteEmbedding(AbsoluteEmbedding):
    """`AbsoluteEmbedding` with timm's interpolation, so that timm's models keep their outputs to the last bit."""

    def _interpolated(self, size: tuple[int, int], prefix: int) -> Tensor:
        # Call the function as an attribute of timm's module: only then does symbolic tracing (torch.fx) keep the call
        # as one node.
        return timm_pos_embed.resample_abs_pos_embed(self.pos_embed, size, self.patch_embed.grid_size, prefix)
