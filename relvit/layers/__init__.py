"""Modules with parameters, built on `relvit.ops`: positions, attention, blocks, patches."""

from relvit.layers import positions
from relvit.layers.attention import RelativeAttention
from relvit.layers.block import GridBlock, MixerBlock, RelativeBlock
from relvit.layers.interpolate import resample_embedding
from relvit.layers.mixer import LayerPlan, Mixer
from relvit.layers.patch_embed import AnySizePatchEmbed, check_divisible, whole_patches
from relvit.layers.positions import *  # noqa: F403 (`positions.__all__` lists these names)
from relvit.layers.prefix_bias import PrefixBias

__all__ = [
    "AnySizePatchEmbed",
    "GridBlock",
    "LayerPlan",
    "Mixer",
    "MixerBlock",
    "PrefixBias",
    "RelativeAttention",
    "RelativeBlock",
    "check_divisible",
    "resample_embedding",
    "whole_patches",
]
__all__ += positions.__all__
