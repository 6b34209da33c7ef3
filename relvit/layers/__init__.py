"""Modules with parameters, built on `relvit.ops`: positions, attention, blocks, patches."""

from relvit.layers.attention import RelativeAttention
from relvit.layers.block import GridBlock, MixerBlock, RelativeBlock
from relvit.layers.interpolate import resample_embedding
from relvit.layers.mixer import LayerPlan, Mixer
from relvit.layers.patch_embed import AnySizePatchEmbed, whole_patches
from relvit.layers.positions import (
    AxialPositionEmbedding,
    ContinuousPosition2d,
    FirePosition2d,
    LookHerePosition2d,
    LowRankPosition2d,
    ParabolicPosition2d,
    RelativePosition2d,
    RotaryEmbedding2d,
    SlopePosition2d,
    factorise_bias,
)
from relvit.layers.prefix_bias import PrefixBias

__all__ = [
    "RelativePosition2d",
    "SlopePosition2d",
    "FirePosition2d",
    "ContinuousPosition2d",
    "ParabolicPosition2d",
    "LowRankPosition2d",
    "LookHerePosition2d",
    "factorise_bias",
    "RotaryEmbedding2d",
    "PrefixBias",
    "AxialPositionEmbedding",
    "RelativeAttention",
    "Mixer",
    "LayerPlan",
    "GridBlock",
    "RelativeBlock",
    "MixerBlock",
    "AnySizePatchEmbed",
    "whole_patches",
    "resample_embedding",
]
