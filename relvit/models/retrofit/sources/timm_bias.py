"""timm's BEiT, Swin, Swin V2 and `vit_relpos_*` after `relvit.retrofit`: a bias per pair, from a table or a network.

timm's offsets are query minus key, relvit's key minus query: tables are reversed along each axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from timm.layers import RelPosMlp
from timm.models import checkpoint
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit
from timm.models.beit import Block as BeitBlock
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, WindowAttention
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

from relvit.layers.patch_embed import GridPatchEmbed
from relvit.layers.positions import ContinuousPosition2d, RelativePosition2d
from relvit.layers.prefix_bias import PrefixBias
from relvit.layers.timm_attention import GridArgument
from relvit.layers.timm_relpos import TimmRelativeBeit, TimmRelativeRelPos, TimmRelativeSwin, TimmRelativeSwinV2
from relvit.models.base import GridForward
from relvit.models.retrofit.source import OwnPositions, open_patch_embed
from relvit.ops import Grid

TABLE = "relative_position_bias_table"
# Entries of a bias table for the class token, as in `PrefixBias`.
PREFIX_ENTRIES = 3
# Prefixes in the names of timm's networks -> those of relvit's.
NETWORKS = {"rel_pos.mlp.": "mlp.", "mlp.": "mlp.", "cpb_mlp.0.": "mlp.fc1.", "cpb_mlp.2.": "mlp.fc2."}


class BiasPositions(OwnPositions):
    """Mixin for models with a bias for each pair of tokens, from a table by offset or a network of the offset."""

    replaced: ClassVar[tuple[str, ...]] = (
        "rel_pos",
        "cpb_mlp",
        TABLE,
        "relative_position_index",
        "relative_coords_table",
    )

    @classmethod
    def modules_for(cls, attn: nn.Module, source: nn.Module) -> dict[str, nn.Module] | None:
        head_dim, heads = attn.proj.in_features // attn.num_heads, attn.num_heads
        if isinstance(source, RelPosMlp | WindowAttentionV2):
            first, mode = (source.cpb_mlp[0], "swin") if source is attn else (source.mlp.fc1, source.mode)
            scaled_by = source.pretrained_window_size if source.pretrained_window_size[0] > 0 else source.window_size
            window = [max(size, 2) for size in scaled_by]
            position = ContinuousPosition2d(head_dim, heads, mode, first.out_features, window)
            if source is not attn:
                # timm's network has dropout of its hidden layer in training.
                position.mlp.drop1.p = source.mlp.drop1.p
            return {"position": position}
        table = getattr(source, TABLE, None)
        if table is None:
            return None
        rows, columns = source.window_size
        modules = {"position": RelativePosition2d(head_dim, heads, "b", (rows - 1, columns - 1), layout="joint")}
        if len(table) > (2 * rows - 1) * (2 * columns - 1):
            modules["prefix_bias"] = PrefixBias(heads)
        return modules

    @classmethod
    def convert(cls, leaf: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        for theirs, ours in NETWORKS.items():
            if leaf.startswith(theirs):
                return {f"position.{ours}{leaf.removeprefix(theirs)}": tensor}
        if not leaf.endswith(TABLE):
            return {leaf: tensor}
        rows, columns = _table_size(len(tensor), modules["position"])
        patches, prefix = tensor[: rows * columns], tensor[rows * columns :]
        converted = {"position.bias_table": patches.flip(0).T.unflatten(1, (rows, columns)).contiguous()}
        return converted | ({"prefix_bias.weight": prefix} if len(prefix) else {})

    @classmethod
    def revert(cls, leaf: str, tensors: Mapping[str, Tensor]) -> Tensor:
        if not leaf.endswith(TABLE):
            return super().revert(leaf, tensors)
        patches = tensors["position.bias_table"].flatten(1).T.flip(0)
        return torch.cat((patches, *(part for name, part in tensors.items() if name.startswith("prefix_bias"))))


def _table_size(entries: int, position: nn.Module) -> tuple[int, int]:
    """Rows and columns of a bias table: those of the layer's own, or else of a square window."""
    rows, columns = (2 * k + 1 for k in position.max_distance)
    if entries - rows * columns in (0, PREFIX_ENTRIES):
        return rows, columns
    for patches in (entries, entries - PREFIX_ENTRIES):
        side = math.isqrt(max(patches, 0))
        if side * side == patches and side % 2:
            return side, side
    raise ValueError(f"{TABLE} has {entries} entries, which fit no square window, with or without a class token")


class GridInBias(BiasPositions, GridForward):
    """Mixin before timm's models whose blocks hand on a shared bias, in place of which they are handed the grid."""

    shared: ClassVar[tuple[str, ...]] = ("shared_rel_pos", "rel_pos_bias")
    # `pool` and padded batches read these attributes.
    pool: ClassVar[Callable[..., Tensor]] = VisionTransformer.pool
    attn_pool = None
    pool_include_prefix = False

    def open_to_all_sizes(self) -> None:
        open_patch_embed(self)
        for name in self.shared:
            setattr(self, name, None)
        for block in self.blocks:
            # timm's `Beit.set_input_size` would resize the tables of an attention with a window.
            block.attn.window_size = None
        absent = {"pos_embed": None, "pos_drop": nn.Identity(), "patch_drop": nn.Identity(), "norm_pre": nn.Identity()}
        for name, value in absent.items():
            if not hasattr(self, name):
                setattr(self, name, value)

    def _run_block(self, block: nn.Module, x: Tensor, grid: Grid, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        if is_causal:
            raise ValueError(f"{type(self).__name__} has no causal attention: give it as attn_mask")
        argument = GridArgument(grid, attn_mask)
        return checkpoint(block, x, argument) if self.grad_checkpointing else block(x, argument)


class RetrofittedRelPos(GridInBias, VisionTransformerRelPos):
    """timm's `VisionTransformerRelPos` after `relvit.retrofit`."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (RelPosBlock, ResPostRelPosBlock)
    attention_classes: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {RelPosAttention: TimmRelativeRelPos}


class RetrofittedBeit(GridInBias, Beit):
    """timm's `Beit` after `relvit.retrofit`."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (BeitBlock,)
    attention_classes: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {BeitAttention: TimmRelativeBeit}


class SwinWindows(BiasPositions):
    """Mixin before timm's Swin Transformers, which cut windows of one size, and make masks for the image at hand."""

    num_prefix_tokens = 0

    def open_to_all_sizes(self) -> None:
        open_patch_embed(self, GridPatchEmbed)
        for _, block in self.named_blocks(self):
            block.dynamic_mask, block.attn_mask = True, None
            block.attn.set_window_size(block.window_size)


class RetrofittedSwin(SwinWindows, SwinTransformer):
    """timm's `SwinTransformer` after `relvit.retrofit`."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (SwinTransformerBlock,)
    attention_classes: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {WindowAttention: TimmRelativeSwin}


class RetrofittedSwinV2(SwinWindows, SwinTransformerV2):
    """timm's `SwinTransformerV2` after `relvit.retrofit`."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (SwinTransformerV2Block,)
    attention_classes: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {WindowAttentionV2: TimmRelativeSwinV2}

    def no_weight_decay(self) -> set[str]:
        """Return timm's names, among them the networks of positions."""
        return super().no_weight_decay() | {name for name, _ in self.named_parameters() if ".position." in name}
