"""Modules with parameters, built on `relvit.ops`: positions, attention, attention-free mixers, blocks, patches."""

from relvit.layers.aft import AFTConv2d, AFTFull, AFTLocal, AFTSimple
from relvit.layers.attention import RelativeAttention
from relvit.layers.block import GridBlock, MixerBlock, RelativeBlock
from relvit.layers.interpolate import resample_embedding
from relvit.layers.lsh import LSHAttention
from relvit.layers.patch_embed import AnySizePatchEmbed
from relvit.layers.positions import (
    AxialPositionEmbedding,
    RelativePosition2d,
    SlopePosition2d,
    TransformerXLPosition2d,
)

__all__ = [
    "RelativePosition2d",
    "SlopePosition2d",
    "TransformerXLPosition2d",
    "AxialPositionEmbedding",
    "RelativeAttention",
    "AFTFull",
    "AFTLocal",
    "AFTSimple",
    "AFTConv2d",
    "LSHAttention",
    "GridBlock",
    "RelativeBlock",
    "MixerBlock",
    "AnySizePatchEmbed",
    "resample_embedding",
]
