"""Depth of a model: reversible blocks, or one block several times with halting of single tokens."""

from relvit.layers.depth.reversible import reversible_blocks

__all__ = ["reversible_blocks"]
