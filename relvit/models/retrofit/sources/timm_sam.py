"""timm's `VisionTransformerSAM` (Segment Anything) after `relvit.retrofit`: a table per axis, met by queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from timm.models.vision_transformer_sam import Attention, Block, VisionTransformerSAM
from torch import Tensor, nn

from relvit.layers.patch_embed import GridPatchEmbed
from relvit.layers.positions import RelativePosition2d
from relvit.layers.timm_relpos import TimmRelativeSam
from relvit.models.retrofit.source import OwnPositions, open_patch_embed

# timm's tables are reversed along their axis, since their offsets are query minus key.
TABLES = {"rel_pos_h": "position.key_rows", "rel_pos_w": "position.key_cols"}


class RetrofittedSam(OwnPositions, VisionTransformerSAM):
    """timm's `VisionTransformerSAM` after `relvit.retrofit`; blocks cut windows as before, zeros around the image."""

    num_prefix_tokens = 0
    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (Block,)
    attention_classes: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {Attention: TimmRelativeSam}
    replaced: ClassVar[tuple[str, ...]] = tuple(TABLES)

    @classmethod
    def modules_for(cls, attn: nn.Module, source: nn.Module) -> dict[str, nn.Module] | None:
        if not attn.use_rel_pos:
            return None
        head_dim = attn.rel_pos_h.shape[1]
        distance = [len(table) // 2 for table in (attn.rel_pos_h, attn.rel_pos_w)]
        return {"position": RelativePosition2d(head_dim, attn.num_heads, "k", distance)}

    @classmethod
    def convert(cls, leaf: str, tensor: Tensor, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        # timm adds products with queries that are not scaled.
        return {TABLES[leaf]: tensor.flip(0) * tensor.shape[1] ** 0.5} if leaf in TABLES else {leaf: tensor}

    def open_to_all_sizes(self) -> None:
        open_patch_embed(self, GridPatchEmbed)
        for block in self.blocks:
            if block.window_size:
                block.attn.block_window = (block.window_size,) * 2
