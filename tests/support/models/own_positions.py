"""Small models of every library with their own relative positions, called in one way and compared by name."""

import copy

import torch
from beit_cases import BEITS, hf_beit
from comparisons import tensors_of
from retrofit_cases import OWN, build, images
from sam_cases import SAMS, sam_encoder, with_large_weights
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg

import relvit

MVIT = {"depths": (1, 2, 1), "embed_dim": (6, 12, 24), "num_heads": (1, 2, 4)}
MVITS = {
    "patches": {},
    "class token": {"use_cls_token": True},
    "expanded late": {"expand_attn": False, "residual_pooling": False, "use_cls_token": True},
    "max": {"mode": "max"},
    "strides that do not divide": {"stride_kv": ((3, 3), (1, 1), (1, 1))},
}
# In the models of KEPT, tables keep the names that they have in the source.
KEPT = (*MVITS, *BEITS, *SAMS)
SOURCES = (*OWN, *KEPT)


def mvit(case, img_size=(64, 64), **changes):
    torch.manual_seed(0)
    return with_large_weights(MultiScaleVit(MultiScaleVitCfg(**MVIT | MVITS[case] | changes), img_size, num_classes=5))


def source_of(case):
    """Build the original model in double precision, with large weights."""
    makers = ((OWN, build), (MVITS, mvit), (BEITS, hf_beit), (SAMS, sam_encoder))
    return next(make(case) for cases, make in makers if case in cases)


def trained_images(case):
    if case in OWN:
        return images(*OWN[case][1]["img_size"])
    side = 64 if case in MVITS else 40 if case in BEITS else 56
    return images(side, side)


def imported(original, **options):
    """Return a copy after `relvit.retrofit`."""
    return relvit.retrofit(copy.deepcopy(original), **options)


def outputs(model, x, **options):
    """Return all tensors that a model returns, including those of layers and stages, by name."""
    if isinstance(model, MultiScaleVit):
        last, stages = model.forward_intermediates(x, norm=True)
        return {"classes": model(x), "last": last} | {f"stage {index}": part for index, part in enumerate(stages)}
    if not hasattr(model, "config"):
        return {"": model(x)}
    if model.config.model_type in ("beit", "data2vec-vision") and not model.training:
        options = {"output_attentions": model.config._attn_implementation == "eager", **options}
    return tensors_of(model(x, output_hidden_states=True, **options))


def tolerance_of(case, dtype=torch.float64):
    """Return the largest difference that is allowed, relative to the largest number of the source."""
    # Eager attention computes the softmax in single precision, except in Data2Vec.
    exact = 1e-6 if case.endswith("eager") and case != "data2vec eager" else 1e-10
    return {torch.float64: exact, torch.float32: 1e-5}.get(dtype, 2e-2)


def tables_of(model):
    """Return the names of the parameters of positions, in a source or in a retrofitted model."""
    parts = (".position.", "rel_pos", "relative_position", "cpb_mlp", "prefix_bias")
    return [name for name, _ in model.named_parameters() if any(part in name for part in parts)]
