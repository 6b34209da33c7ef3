"""Leaves of symbolic tracing (torch.fx): modules that timm's `create_feature_extractor` keeps whole.

They look at sizes, which have no value while a model is traced; a user's position module is in one of them. The
interpolation of embeddings, a function, is a leaf too, see `relvit.layers.interpolate`.
"""

from timm.layers import register_notrace_module

from relvit.layers import AFTSimple, AnySizePatchEmbed, AxialPositionEmbedding, LSHAttention, RelativeAttention
from relvit.layers.depth.halting import AdaptiveHalting
from relvit.layers.depth.signals import PositionStepSignals
from relvit.layers.timm_attention import TimmRelativeAttention

for _leaf in (
    *(RelativeAttention, TimmRelativeAttention, AFTSimple, LSHAttention),
    *(AnySizePatchEmbed, AxialPositionEmbedding, PositionStepSignals, AdaptiveHalting),
):
    register_notrace_module(_leaf)
