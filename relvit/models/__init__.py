"""The core's models, registered with timm by the import; how to build, retrofit and load any of them."""

from relvit.models.attention_maps import AttentionMaps, attention_maps, attention_rollout
from relvit.models.explain import explain
from relvit.models.factory import build_model, model_arguments
from relvit.models.param_groups import param_groups
from relvit.models.relative_vit import RelVisionTransformer
from relvit.models.retrofit import restore, retrofit, retrofit_arguments
from relvit.models.retrofit.registered import retrofitted
from relvit.models.sizes.image_size import check_image_size
from relvit.models.sizes.reach import Reach, set_reach
from relvit.models.weights import checkpoint_filter_fn

__all__ = [
    "AttentionMaps",
    "Reach",
    "RelVisionTransformer",
    "attention_maps",
    "attention_rollout",
    "build_model",
    "check_image_size",
    "checkpoint_filter_fn",
    "explain",
    "model_arguments",
    "param_groups",
    "restore",
    "retrofit",
    "retrofit_arguments",
    "retrofitted",
    "set_reach",
]
