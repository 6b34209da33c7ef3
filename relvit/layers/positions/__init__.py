"""Position modules: relative tables, slopes, sinusoids; absolute axial, rotary embeddings; a paper is a file."""

from relvit.layers.positions.axial import AxialPositionEmbedding
from relvit.layers.positions.slopes import SlopePosition2d
from relvit.layers.positions.tables import RelativePosition2d
from relvit.layers.positions.xl import TransformerXLPosition2d

__all__ = ["AxialPositionEmbedding", "RelativePosition2d", "SlopePosition2d", "TransformerXLPosition2d"]
