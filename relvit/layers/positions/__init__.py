"""Position modules, one file for each paper, with their names; axial and rotary embeddings."""

from collections.abc import Callable
from functools import partial

from torch import nn

from relvit.layers.positions.axial import AxialPositionEmbedding
from relvit.layers.positions.base import Position
from relvit.layers.positions.combined import CombinedPosition2d
from relvit.layers.positions.continuous import ContinuousPosition2d
from relvit.layers.positions.fire import FirePosition2d
from relvit.layers.positions.lookhere import LookHerePosition2d
from relvit.layers.positions.low_rank import LowRankPosition2d, factorise_bias
from relvit.layers.positions.parabolic import ParabolicPosition2d
from relvit.layers.positions.rope import RotaryEmbedding2d
from relvit.layers.positions.slopes import SlopePosition2d
from relvit.layers.positions.tables import RelativePosition2d

__all__ = [
    "AxialPositionEmbedding",
    "CombinedPosition2d",
    "ContinuousPosition2d",
    "FirePosition2d",
    "LookHerePosition2d",
    "LowRankPosition2d",
    "ParabolicPosition2d",
    "Position",
    "RelativePosition2d",
    "RotaryEmbedding2d",
    "SlopePosition2d",
    "factorise_bias",
]

# The argument `position` of models and `retrofit` takes these names; packages in `relvit.families` add their own.
POSITIONS: dict[str, Callable[..., nn.Module]] = {
    "tables": RelativePosition2d,
    "slopes": SlopePosition2d,
    "slopes-euclidean": partial(SlopePosition2d, distance="euclidean"),
    "fire": FirePosition2d,
    "cpb": ContinuousPosition2d,
    "pape": ParabolicPosition2d,
    "low-rank": LowRankPosition2d,
    "lookhere": LookHerePosition2d,
}
