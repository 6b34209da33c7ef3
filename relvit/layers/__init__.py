"""Modules that own parameters and call `relvit.ops`: positions, attention, blocks."""

from relvit.layers.attention import RelativeAttention
from relvit.layers.block import RelativeBlock
from relvit.layers.position import RelativePosition2d

__all__ = ["RelativePosition2d", "RelativeAttention", "RelativeBlock"]
