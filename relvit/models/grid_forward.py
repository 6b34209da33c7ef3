"""The way through a timm Vision Transformer on which every block is told where its tokens lie."""

from __future__ import annotations

from typing import Any

import torch
from timm.models._features import feature_take_indices
from torch import Tensor

from relvit.ops import Grid, patch_coords


class GridForward:
    """Mixin before timm's `VisionTransformer`: the `Grid` is made at the patch embedding and handed to every block.

    The model has `dynamic_img_size`, and where patches are dropped, `PatchDropoutWithIndices`. What a block is called
    with is up to the model's `_run_block`.
    """

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Images (B, in_chans, height, width) -> tokens (B, N, embed_dim) and where they lie."""
        x = self.patch_embed(x)
        grid = Grid(x.shape[1], x.shape[2], self.num_prefix_tokens)
        x = self._pos_embed(x)
        if self.pos_embed is None:
            x = self.pos_drop(x)  # timm applies it to absolute embeddings only
        dropped = self.patch_drop(x)
        if isinstance(dropped, tuple):
            x, kept = dropped
            if kept is not None:
                grid = Grid(grid.height, grid.width, grid.prefix, patch_coords(grid, x.device)[kept], None)
        return self.norm_pre(x), grid

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Images (B, in_chans, height, width) -> normalised tokens (B, N, embed_dim), prefix tokens first.

        Args:
            x: images, sides multiples of the patch unless `dynamic_img_pad`.
            attn_mask: broadcastable to (B, heads, N, N), see `relvit.ops.relative_attention`.
            is_causal: let tokens see only earlier ones.
        """
        x, grid = self.embed(x)
        for block in self.blocks:
            if torch.jit.is_scripting():
                x = block(x, grid, attn_mask, is_causal)
            else:
                x = self._run_block(block, x, grid, attn_mask, is_causal)
        return self.norm(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]] | dict[str, Any]:
        """Features after chosen blocks; arguments and results as timm's `VisionTransformer.forward_intermediates`."""
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        x, grid = self.embed(x)
        if grid.coords is not None and output_fmt == "NCHW":
            raise ValueError("output_fmt 'NCHW' needs all patches, patch_drop_rate dropped some: use 'NLC' or eval()")
        taken = []
        for index, block in enumerate(self.blocks[: max_index + 1] if stop_early else self.blocks):
            x = self._run_block(block, x, grid, attn_mask, is_causal)
            if index in take_indices:
                taken.append(self.norm(x) if norm else x)

        prefixes = [tokens[:, : self.num_prefix_tokens] for tokens in taken] if self.num_prefix_tokens else None
        patches = [tokens[:, self.num_prefix_tokens :] for tokens in taken]
        if output_fmt == "NCHW":
            patches = [p.transpose(1, 2).unflatten(2, (grid.height, grid.width)).contiguous() for p in patches]

        if output_dict:
            result: dict[str, Any] = {"image_intermediates": patches}
            if return_prefix_tokens and prefixes is not None:
                result["image_intermediates_prefix"] = prefixes
            if not intermediates_only:
                result["image_features"] = self.norm(x)
            return result
        if return_prefix_tokens and prefixes is not None:
            patches = list(zip(patches, prefixes, strict=True))
        return patches if intermediates_only else (self.norm(x), patches)
