"""Models, one file per family, registered with timm by the import; how to build, retrofit and load them."""

from relvit.models import fx_leaves as fx_leaves
from relvit.models.aft_vit import AFTVisionTransformer
from relvit.models.attention_maps import AttentionMaps, attention_maps, attention_rollout
from relvit.models.factory import build_model, model_arguments
from relvit.models.lsh_vit import LSHVisionTransformer
from relvit.models.relative_vit import RelVisionTransformer
from relvit.models.retrofit import retrofit, retrofit_arguments
from relvit.models.retrofit.registered import retrofitted
from relvit.models.sizes.bands import Bands, Memory, classify_bands, forward_segment, set_bands
from relvit.models.sizes.image_size import check_image_size
from relvit.models.sizes.reach import Reach, set_reach
from relvit.models.universal_vit import Pondered, UniversalVisionTransformer
from relvit.models.weights import checkpoint_filter_fn

__all__ = [
    "AFTVisionTransformer",
    "AttentionMaps",
    "Bands",
    "LSHVisionTransformer",
    "Memory",
    "Pondered",
    "Reach",
    "RelVisionTransformer",
    "UniversalVisionTransformer",
    "attention_maps",
    "attention_rollout",
    "build_model",
    "check_image_size",
    "checkpoint_filter_fn",
    "classify_bands",
    "forward_segment",
    "model_arguments",
    "retrofit",
    "retrofit_arguments",
    "retrofitted",
    "set_bands",
    "set_reach",
]
