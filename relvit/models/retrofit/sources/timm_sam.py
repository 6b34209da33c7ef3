"""timm's `VisionTransformerSAM` (Segment Anything) after `relvit.retrofit`: a table per axis, met by queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from timm.models.vision_transformer_sam import Attention, Block, VisionTransformerSAM
from torch import Tensor, nn

from relvit.layers.patch_embed import GridPatchEmbed
from relvit.layers.timm_attention import GridArgument
from relvit.layers.timm_relpos import TimmOwnRelative
from relvit.models.retrofit.source import Layers, OwnPositions, open_patch_embed
from relvit.models.retrofit.sources.sam import SamAttention, check_tables
from relvit.ops import Grid

# Names of tables in checkpoints of relvit 0.2: reversed along their axis, and times the root of the width.
EARLIER = {"position.key_rows": "rel_pos_h", "position.key_cols": "rel_pos_w"}


class TimmRelativeSam(SamAttention, TimmOwnRelative, Attention):
    """timm's `Attention` of SAM after a retrofit, see `TimmRelativeAttention`; its blocks cut windows themselves."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, rows, columns, dim) tokens to the same shape."""
        height, width = x.shape[1], x.shape[2]
        x = TimmOwnRelative.forward(self, x.flatten(1, 2), attn_mask=GridArgument(Grid(height, width), None))
        return x.unflatten(1, (height, width))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in EARLIER:
            if (table := state_dict.pop(prefix + name, None)) is not None:
                state_dict |= {prefix + key: part for key, part in in_source_terms(name, table).items()}
        super()._load_from_state_dict(state_dict, prefix, *args)


def in_source_terms(leaf: str, table: Tensor) -> dict[str, Tensor]:
    """Convert a table of a checkpoint of relvit 0.2 to the source's; another tensor stays as it is."""
    return {EARLIER[leaf]: table.flip(0) * table.shape[1] ** -0.5} if leaf in EARLIER else {leaf: table}


class RetrofittedSam(OwnPositions, VisionTransformerSAM):
    """timm's `VisionTransformerSAM` after `relvit.retrofit`; blocks cut windows as before, zeros around the image."""

    num_prefix_tokens = 0
    block_classes: ClassVar[tuple[type[nn.Module], ...]] = (Block,)
    attention_classes: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {Attention: TimmRelativeSam}

    @classmethod
    def make_layers(cls, model: nn.Module, factory: Callable[..., nn.Module]) -> Layers:
        """Build nothing: tables stay where they are."""
        check_tables(cls.named_blocks(model))
        return {f"{name}.attn": {} for name, _ in cls.named_blocks(model)}

    @classmethod
    def convert(cls, leaf: str, tensor: Tensor, modules: Mapping[str, Any]) -> dict[str, Tensor]:
        tensors = in_source_terms(leaf, tensor)
        for name in EARLIER.values():
            if name in tensors:
                # A model for images of another size has longer or shorter tables: beyond the edge there is the edge.
                given, own = (len(table) // 2 for table in (tensors[name], getattr(modules["position"].layer, name)))
                offsets = torch.arange(-own, own + 1, device=tensor.device).clamp(-given, given) + given
                tensors[name] = tensors[name] if own == given else tensors[name][offsets]
        return tensors

    def open_to_all_sizes(self) -> None:
        open_patch_embed(self, GridPatchEmbed)
        for block in self.blocks:
            block.attn.table_grid = tuple((len(table) + 1) // 2 for table in block.attn.position.parameters())
            if block.window_size:
                block.attn.block_window = (block.window_size,) * 2
