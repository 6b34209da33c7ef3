"""Position modules: relative tables and slopes, absolute axial embeddings, rotary embeddings; a paper is a file."""

from relvit.layers.positions.axial import AxialPositionEmbedding
from relvit.layers.positions.slopes import SlopePosition2d
from relvit.layers.positions.tables import RelativePosition2d

__all__ = ["AxialPositionEmbedding", "RelativePosition2d", "SlopePosition2d"]
