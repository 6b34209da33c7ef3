"""What cannot be retrofitted says why, and stays as it was."""

import re

import pytest
import timm
import torch
from retrofit_cases import SMALL, build
from timm.models.eva import Eva
from timm.models.vision_transformer import (
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    ParallelThingsBlock,
    VisionTransformer,
)
from torch import nn

import relvit
from relvit.layers import SlopePosition2d


class Mine(VisionTransformer):
    pass


def plain(**kwargs):
    return VisionTransformer(**{**SMALL, **kwargs})


def with_one_other_attention():
    """The last block is at fault: all that come before must stay as they are."""
    model = plain()
    model.blocks[1].attn = plain(attn_layer="diff").blocks[1].attn
    return model


def after(model, **kwargs):
    return relvit.retrofit(model, **kwargs)


MODELS = {
    "parallel": (
        lambda: plain(block_fn=ParallelScalingBlock),
        r"blocks\.0 is a ParallelScalingBlock, which cannot be retrofitted: its attention and its MLP share",
    ),
    "two attentions": (
        lambda: plain(block_fn=ParallelThingsBlock),
        r"blocks\.0 is a ParallelThingsBlock.*side by side",
    ),
    "differential": (lambda: plain(block_fn=DiffParallelScalingBlock), r"blocks\.0 is a DiffParallelScalingBlock"),
    "one differential": (with_one_other_attention, r"blocks\.1\.attn is a DiffAttention.*difference of two softmaxes"),
    "convolutions": (
        lambda: timm.create_model("test_resnet"),
        "ResNet cannot be retrofitted: retrofit takes timm's Vis",
    ),
    "relpos": (
        lambda: timm.create_model("test_vit_relpos"),
        r"VisionTransformerRelPos .* it has relative positions of its own, blocks\.0\.attn\.rel_pos",
    ),
    "beit": (
        lambda: timm.create_model("beit_base_patch16_224", embed_dim=24, depth=1, num_heads=2),
        r"Beit .* of its own, blocks\.0\.attn\.relative_position_bias_table",
    ),
    "swin": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", embed_dim=12, depths=(1, 1, 1, 1)),
        "SwinTransformer cannot be retrofitted: it has relative positions of its own",
    ),
    "twice": (
        lambda: after(plain()),
        "RetrofittedVisionTransformer cannot be retrofitted: it has been retrofitted already",
    ),
    "twice, eva": (lambda: after(build("eva02")), "it has been retrofitted already"),
    "relvit": (lambda: timm.create_model("test_relvit"), "it has relative positions, chosen by the arguments of timm"),
    "subclass": (lambda: Mine(**SMALL), "Mine cannot be retrofitted: it is a subclass of timm's VisionTransformer"),
    "wrapped": (
        lambda: timm.create_model("test_vit", features_only=True),
        "FeatureGetterNet cannot be retrofitted: it wraps model, a VisionTransformer: retrofit that one before",
    ),
    "no timm model": (lambda: nn.TransformerEncoderLayer(8, 2), "TransformerEncoderLayer cannot be retrofitted"),
    "embedding": (
        lambda: plain(embed_layer=type("MyEmbed", (timm.layers.PatchEmbed,), {})),
        "patch_embed is a MyEmbed, which cannot be retrofitted; allowed: 'PatchEmbed'",
    ),
}


def make_nothing(*_args, **_kwargs):
    return None


def make_identity(*_args, **_kwargs):
    return nn.Identity()


ARGUMENTS = [
    ({"rel_terms": "kz"}, ValueError, "each at most once, got 'kz'"),
    ({"max_distance": -1}, ValueError, "max_distance must be at least 0"),
    ({"layout": "join"}, ValueError, "did you mean 'joint'"),
    (
        {"abs_pos": "dropp"},
        ValueError,
        r"abs_pos must be one of 'keep', 'freeze', 'drop', got 'dropp' \(did you mean 'drop'",
    ),
    ({"backend": "fussed"}, ValueError, "did you mean 'fused'"),
    ({"max_grid": 32}, ValueError, "max_grid is for NaFlexVit, got 32 for VisionTransformer"),
    (
        {"position": SlopePosition2d, "rel_terms": "k"},
        ValueError,
        "rel_terms is for tables, got rel_terms='k' together",
    ),
    ({"init_std": -1.0}, ValueError, "init_std must not be negative"),
    ({"position": make_nothing}, TypeError, "a position must be a module from Grid to RelativeTerms"),
    ({"position": nn.Linear}, TypeError, "position Linear cannot be called with a Grid"),
    ({"position": make_identity}, TypeError, "position Identity must return RelativeTerms, got Grid"),
    ({"position": SlopePosition2d(4, 2)}, TypeError, "position must make a module of its own for every block"),
    ({"position": "slops"}, ValueError, r"position must be one of 'tables', 'slopes'.* .did you mean 'slopes'"),
]


def fingerprint(model):
    return [(name, type(module), sorted(module.__dict__)) for name, module in model.named_modules()]


@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_refused(name):
    make, message = MODELS[name]
    model = make()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        relvit.retrofit(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("kwargs", "kind", "message"), ARGUMENTS, ids=lambda value: re.sub(r" at 0x\w+", "", str(value))[:40]
)
def test_arguments_that_are_refused(kwargs, kind, message):
    model = plain()
    before = fingerprint(model)
    with pytest.raises(kind, match=message):
        relvit.retrofit(model, **kwargs)
    assert fingerprint(model) == before
    relvit.retrofit(model)


def test_max_grid_of_naflex():
    model = build("naflex")
    with pytest.raises(ValueError, match=re.escape("max_grid must be an int or (rows, columns), got (1, 2, 3)")):
        relvit.retrofit(model, max_grid=(1, 2, 3))
    assert relvit.retrofit(model).max_grid == (64, 64)


def test_an_absolute_embedding_that_is_not_there():
    with pytest.raises(ValueError, match="abs_pos='drop': this Eva has no absolute embedding, leave 'keep'"):
        relvit.retrofit(Eva(**SMALL, use_abs_pos_emb=False), abs_pos="drop")


def test_a_name_is_no_model():
    with pytest.raises(TypeError, match=r"got 'vit_tiny' of type str: create the model first, with timm.create_model"):
        relvit.retrofit("vit_tiny")
    with pytest.raises(TypeError, match="model must be a timm model, got 3 of type int"):
        relvit.retrofit(3)


def test_images_that_do_not_fit():
    for case in ("clip", "eva", "naflex"):
        arguments = {"embed_proj_type": "linear"} if case == "naflex" else {}
        model = relvit.retrofit(build(case, **arguments))
        with pytest.raises(ValueError, match="image width 20 is not a multiple of the patch size 8: use 16 or 24"):
            model(torch.zeros(1, 3, 16, 20, dtype=torch.float64))
