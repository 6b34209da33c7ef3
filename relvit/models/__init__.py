"""The core's models, registered with timm by the import; how to build, retrofit and load any of them."""

from relvit.models.attention_maps import AttentionMaps, attention_maps, attention_rollout, logit_inputs, patch_grid
from relvit.models.base import GridVisionTransformer
from relvit.models.depth import lack
from relvit.models.factory import build_model, check_model_size, described_model, model_arguments
from relvit.models.layer_plans import explain
from relvit.models.param_groups import param_groups
from relvit.models.relative_vit import RelVisionTransformer
from relvit.models.retrofit import restore, retrofit, retrofit_arguments
from relvit.models.retrofit.registered import retrofitted
from relvit.models.sizes.image_size import at_image_size, check_image_size, patch_size_of
from relvit.models.sizes.native import check_native
from relvit.models.sizes.reach import Reach, set_reach
from relvit.models.sizes.run import pooled_features
from relvit.models.weights import checkpoint_filter_fn
from relvit.models.weights.transfer import TransferReport, Weights, transfer_weights

__all__ = [
    "AttentionMaps",
    "GridVisionTransformer",
    "Reach",
    "RelVisionTransformer",
    "TransferReport",
    "Weights",
    "at_image_size",
    "attention_maps",
    "attention_rollout",
    "build_model",
    "check_image_size",
    "check_model_size",
    "check_native",
    "checkpoint_filter_fn",
    "described_model",
    "explain",
    "lack",
    "logit_inputs",
    "model_arguments",
    "param_groups",
    "patch_grid",
    "patch_size_of",
    "pooled_features",
    "restore",
    "retrofit",
    "retrofit_arguments",
    "retrofitted",
    "set_reach",
    "transfer_weights",
]
