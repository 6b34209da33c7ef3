"""Reversible blocks (Gomez et al. 2017, arXiv 1707.04585): two streams of tokens, recomputed in backward."""

from relvit.families.reversible import reversible_vit as reversible_vit
from relvit.families.reversible.blocks import reversible_blocks
from relvit.families.reversible.two_streams import ReversibleDepth
from relvit.models.depth import DEPTHS

__all__ = ["reversible_blocks", "ReversibleDepth"]

DEPTHS["reversible"] = ReversibleDepth()
