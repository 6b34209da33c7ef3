"""Universal Transformers (Dehghani et al. 2018, arXiv 1807.03819): one block several times, with adaptive halting."""

from relvit.families.universal.halting import AdaptiveHalting
from relvit.families.universal.signals import PositionStepSignals
from relvit.families.universal.universal_vit import Pondered, UniversalVisionTransformer

__all__ = ["AdaptiveHalting", "Pondered", "PositionStepSignals", "UniversalVisionTransformer"]
