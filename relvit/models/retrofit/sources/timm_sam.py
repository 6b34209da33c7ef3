"""timm's `VisionTransformerSAM` (Segment Anything) after `relvit.retrofit`: a table per axis, multiplied by queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from timm.models.vision_transformer_sam import Attention, Block, VisionTransformerSAM
from torch import Tensor, nn

from relvit.layers.patch_embed import GridPatchEmbed
from relvit.models.retrofit.source import Classes, Exchange, OwnPositions, WholeImages, open_patch_embed
from relvit.models.retrofit.sources.sam import SamAttention
from relvit.models.retrofit.timm_attention import GridArgument
from relvit.models.retrofit.timm_relpos import TimmOwnRelative
from relvit.models.weights.convert import to_distance
from relvit.ops import Grid

TABLES = ("rel_pos_h", "rel_pos_w")


class TimmRelativeSam(SamAttention, TimmOwnRelative, Attention):
    """timm's `Attention` of SAM after a retrofit, see `TimmRelativeAttention`; its blocks cut windows themselves."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, rows, columns, dim) tokens to the same shape."""
        height, width = x.shape[1], x.shape[2]
        x = TimmOwnRelative.forward(self, x.flatten(1, 2), attn_mask=GridArgument(Grid(height, width), None))
        return x.unflatten(1, (height, width))


class RetrofittedSam(OwnPositions, WholeImages, VisionTransformerSAM):
    """timm's `VisionTransformerSAM` after `relvit.retrofit`; blocks cut windows and pad with zeros as before."""

    num_prefix_tokens = 0
    block_classes: ClassVar[Classes] = (Block,)
    attention_classes: ClassVar[Exchange] = {Attention: TimmRelativeSam}

    @classmethod
    def has_positions(cls, model: nn.Module, attn: nn.Module) -> bool:
        return attn.use_rel_pos

    def adapt_tables(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        adapted = dict(state)
        for path, attn in self.named_attentions(self):
            for key, own in ((f"{path}.{name}", getattr(attn, name)) for name in TABLES):
                # A model for another image size has tables of another length: cut or extend the tables.
                if key in adapted:
                    adapted[key] = to_distance(adapted[key], 0, len(own) // 2, key, "clip")
        return adapted

    def open_to_all_sizes(self) -> None:
        open_patch_embed(self, GridPatchEmbed)
        for block in self.blocks:
            block.attn.table_grid = tuple((len(table) + 1) // 2 for table in block.attn.position.parameters())
            if block.window_size:
                block.attn.block_window = (block.window_size,) * 2
