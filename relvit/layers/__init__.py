"""Modules that own parameters and call `relvit.ops`: positions, attention, blocks, patches."""

from relvit.layers.attention import RelativeAttention
from relvit.layers.axial import AxialPositionEmbedding
from relvit.layers.block import RelativeBlock
from relvit.layers.patch_embed import AnySizePatchEmbed
from relvit.layers.position import RelativePosition2d
from relvit.layers.resample import resample_embedding
from relvit.layers.slopes import SlopePosition2d

__all__ = [
    "RelativePosition2d",
    "SlopePosition2d",
    "AxialPositionEmbedding",
    "RelativeAttention",
    "RelativeBlock",
    "AnySizePatchEmbed",
    "resample_embedding",
]
