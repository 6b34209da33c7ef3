"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): its relative positions, and its recurrence over segments."""

from relvit.families.transformer_xl.bands import Bands, Memory, classify_bands, forward_segment, set_bands
from relvit.families.transformer_xl.xl_position import TransformerXLPosition2d
from relvit.layers.positions import POSITIONS
from relvit.models.recurrence import RECURRENCES

__all__ = ["Bands", "Memory", "TransformerXLPosition2d", "classify_bands", "forward_segment", "set_bands"]

POSITIONS["xl"] = TransformerXLPosition2d
RECURRENCES["bands"] = Bands
