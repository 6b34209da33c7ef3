"""`ImageEncoderViT` of `segment_anything` (Kirillov et al. 2023, arXiv 2304.02643) after `relvit.retrofit`."""

from __future__ import annotations

from typing import ClassVar

from segment_anything.modeling.image_encoder import Attention, Block, ImageEncoderViT, PatchEmbed
from torch import Tensor

from relvit.models.retrofit.source import Classes, Exchange
from relvit.models.retrofit.sources.sam import SamEncoder, SamPatchEmbed, SamRowsAttention


class RetrofittedAttention(SamRowsAttention, Attention):
    """`segment_anything`'s `Attention` after a retrofit."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, rows, columns, dim) tokens to the same shape."""
        return self.attend_rows(x)


class RetrofittedPatchEmbed(SamPatchEmbed, PatchEmbed):
    """`segment_anything`'s `PatchEmbed` after a retrofit."""

    convolution: ClassVar[str] = "proj"


class RetrofittedImageEncoder(SamEncoder, ImageEncoderViT):
    """`segment_anything`'s `ImageEncoderViT` after `relvit.retrofit`."""

    block_classes: ClassVar[Classes] = (Block,)
    attention_classes: ClassVar[Exchange] = {Attention: RetrofittedAttention}
    patch_embed_classes: ClassVar[Exchange] = {PatchEmbed: RetrofittedPatchEmbed}

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, in_chans, height, width) to features (B, out_chans, rows, columns)."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.neck(x.permute(0, 3, 1, 2))
