"""Attention-free transformers (AFT, Zhai et al. 2021, arXiv 2105.14103): averages of values, weighted by exp(K + w)."""

from relvit.families.aft.aft_vit import MIXER, AFTVisionTransformer
from relvit.families.aft.mixers import AFTConv2d, AFTFull, AFTLocal, AFTSimple
from relvit.families.aft.operations import aft_conv, aft_full, aft_local, aft_simple
from relvit.models.weights.transfer import UNFIT

__all__ = [
    "aft_full",
    "aft_local",
    "aft_simple",
    "aft_conv",
    "AFTFull",
    "AFTLocal",
    "AFTSimple",
    "AFTConv2d",
    "AFTVisionTransformer",
]

UNFIT[MIXER] = "is of an attention-free model, whose queries and keys have no meaning"
