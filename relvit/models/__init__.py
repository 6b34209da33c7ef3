"""The core's models, registered with timm by the import; how to retrofit models and load weights into them."""

from relvit.models.attention_maps import AttentionMaps, attention_maps, attention_rollout, logit_inputs, patch_grid
from relvit.models.base import GridVisionTransformer
from relvit.models.depth import lack
from relvit.models.layer_plans import explain
from relvit.models.param_groups import param_groups
from relvit.models.relative_vit import RelVisionTransformer
from relvit.models.retrofit import restore, retrofit, retrofit_arguments
from relvit.models.retrofit.registered import retrofitted
from relvit.models.sizes.reach import Reach, set_reach
from relvit.models.weights import checkpoint_filter_fn
from relvit.models.weights.transfer import TransferReport, Weights, classifiers_of, transfer_weights

__all__ = [
    "AttentionMaps",
    "GridVisionTransformer",
    "Reach",
    "RelVisionTransformer",
    "TransferReport",
    "Weights",
    "attention_maps",
    "attention_rollout",
    "checkpoint_filter_fn",
    "classifiers_of",
    "explain",
    "lack",
    "logit_inputs",
    "param_groups",
    "patch_grid",
    "restore",
    "retrofit",
    "retrofit_arguments",
    "retrofitted",
    "set_reach",
    "transfer_weights",
]
