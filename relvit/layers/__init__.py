"""Modules that own parameters and call `relvit.ops`: positions, attention, blocks, patches."""

from relvit.layers.aft import AFTConv2d, AFTFull, AFTLocal, AFTSimple
from relvit.layers.attention import RelativeAttention
from relvit.layers.block import GridBlock, MixerBlock, RelativeBlock
from relvit.layers.interpolate import resample_embedding
from relvit.layers.patch_embed import AnySizePatchEmbed
from relvit.layers.positions.axial import AxialPositionEmbedding
from relvit.layers.positions.slopes import SlopePosition2d
from relvit.layers.positions.tables import RelativePosition2d

__all__ = [
    "RelativePosition2d",
    "SlopePosition2d",
    "AxialPositionEmbedding",
    "RelativeAttention",
    "AFTFull",
    "AFTLocal",
    "AFTSimple",
    "AFTConv2d",
    "GridBlock",
    "RelativeBlock",
    "MixerBlock",
    "AnySizePatchEmbed",
    "resample_embedding",
]
