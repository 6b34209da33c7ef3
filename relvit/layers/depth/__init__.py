"""Ways through a stack of blocks."""

from relvit.layers.depth.reversible import reversible_blocks

__all__ = ["reversible_blocks"]
