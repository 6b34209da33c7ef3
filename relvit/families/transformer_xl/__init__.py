"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): its relative positions."""

from relvit.families.transformer_xl.positions import TransformerXLPosition2d
from relvit.layers.positions.factory import POSITIONS

__all__ = ["TransformerXLPosition2d"]

POSITIONS["xl"] = TransformerXLPosition2d
