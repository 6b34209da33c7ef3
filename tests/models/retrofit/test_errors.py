"""Models and arguments that cannot be retrofitted: the reason, and a model that stays as it was."""

import re

import pytest
import timm
import torch
import torchvision
from retrofit_cases import SMALL, build, fingerprint
from timm.models.eva import Eva
from timm.models.maxxvit import MaxxVit, MaxxVitCfg
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import nn
from torchvision.models.video.mvit import MSBlockConfig, MViT

import relvit
from relvit.layers import SlopePosition2d

BLOCK_OF_VIDEOS = MSBlockConfig(1, 8, 8, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2])


class Mine(VisionTransformer):
    pass


def plain(**kwargs):
    return VisionTransformer(**{**SMALL, **kwargs})


def with_one_other_attention():
    """The last block is at fault: all that come before must stay as they are."""
    model = plain()
    model.blocks[1].attn = plain(attn_layer="diff").blocks[1].attn
    return model


MODELS = {
    "parallel": (
        lambda: plain(block_fn=ParallelScalingBlock),
        r"blocks\.0 is a ParallelScalingBlock, which cannot be retrofitted; allowed: 'Block', 'ResPostBlock'",
    ),
    "one differential": (
        with_one_other_attention,
        r"blocks\.1\.attn is a DiffAttention, which .* allowed: .Attention",
    ),
    "convolutions": (
        lambda: timm.create_model("test_resnet"),
        "ResNet cannot be retrofitted: retrofit takes timm's Vis",
    ),
    "others of its own": (
        lambda: MaxxVit(MaxxVitCfg((32,), (1,), ("M",), 16), img_size=56),
        r"MaxxVit .* it has relative positions of its own, stages\.0\.blocks\.0\.attn.*; retrofit takes",
    ),
    "videos": (
        lambda: MViT((32, 32), 4, 2 * [BLOCK_OF_VIDEOS], True, False, rel_pos_embed=True, proj_after_attn=False),
        "MViT cannot be retrofitted: its tokens are those of videos, with a time axis beside rows and columns",
    ),
    "twice": (
        lambda: relvit.retrofit(build("eva02")),
        "RetrofittedEva cannot be retrofitted: it has been retrofitted already",
    ),
    "relvit": (lambda: timm.create_model("test_relvit"), "it has relative positions, chosen by the arguments of timm"),
    "subclass": (lambda: Mine(**SMALL), "Mine cannot be retrofitted: it is a subclass of timm's VisionTransformer"),
    "wrapped": (
        lambda: timm.create_model("test_vit", features_only=True),
        "FeatureGetterNet cannot be retrofitted: it wraps model, a VisionTransformer: retrofit that one before",
    ),
    "torchvision's Swin": (
        lambda: torchvision.models.SwinTransformer([4, 4], 12, [2], [2], [3, 3]),
        "SwinTransformer cannot be retrofitted: it is a Swin Transformer, whose windows have as few tokens at every",
    ),
    "no positions": (lambda: build("beit", use_rel_pos_bias=False), r"blocks\.0\.attn has no relative positions"),
    "rotary SAM": (lambda: build("sam", use_rel_pos=False, use_rope=True), "build the model with its own"),
    "embedding": (
        lambda: plain(embed_layer=type("MyEmbed", (timm.layers.PatchEmbed,), {})),
        "patch_embed is a MyEmbed, which cannot be retrofitted; allowed: 'PatchEmbed'",
    ),
}
ARGUMENTS = [
    ({"rel_terms": "kz"}, ValueError, "each at most once, got 'kz'"),
    ({"max_distance": -1}, ValueError, "max_distance must be at least 0"),
    ({"abs_pos": "dropp"}, ValueError, r"allowed are 'keep', 'freeze', 'drop' \(did you mean 'drop'"),
    ({"backend": "fussed"}, ValueError, "did you mean 'fused'"),
    ({"max_grid": 32}, ValueError, "max_grid is for NaFlexVit, got 32 for VisionTransformer"),
    (
        {"position": SlopePosition2d, "rel_terms": "k"},
        ValueError,
        "rel_terms is for position 'tables', got rel_terms='k'",
    ),
    ({"position": nn.Linear}, TypeError, "position Linear cannot be called with a Grid"),
    ({"position": lambda *_args, **_kwargs: nn.Identity()}, TypeError, "Identity must return RelativeTerms, got Grid"),
    ({"position": SlopePosition2d(4, 2)}, TypeError, "position must make a module of its own for every block"),
    ({"position": "slops"}, ValueError, r"position is 'slops'; allowed are 'tables'.* .did you mean 'slopes'"),
]


@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_refused(name):
    make, message = MODELS[name]
    model = make()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        relvit.retrofit(model)
    assert fingerprint(model) == before


@pytest.mark.parametrize(("kwargs", "kind", "message"), ARGUMENTS, ids=[str(i) for i in range(len(ARGUMENTS))])
def test_arguments_that_are_refused(kwargs, kind, message):
    model = plain()
    before = fingerprint(model)
    with pytest.raises(kind, match=message):
        relvit.retrofit(model, **kwargs)
    assert fingerprint(model) == before
    relvit.retrofit(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rel_terms": "k"}, "rel_terms='k' is for models without relative positions"),
        ({"position": "xl"}, "position='xl' is for models without relative positions"),
        ({"abs_pos": "drop"}, "this Beit has no absolute embedding"),
    ],
)
def test_arguments_for_models_without_positions_of_their_own(arguments, message):
    model = build("beit")
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        relvit.retrofit(model, **arguments)
    assert fingerprint(model) == before


def test_what_only_some_models_have():
    model = build("naflex")
    with pytest.raises(ValueError, match=re.escape("max_grid must be an int or (rows, columns), got (1, 2, 3)")):
        relvit.retrofit(model, max_grid=(1, 2, 3))
    assert relvit.retrofit(model).max_grid == (64, 64)
    with pytest.raises(ValueError, match="abs_pos='drop': this Eva has no absolute embedding, leave 'keep'"):
        relvit.retrofit(Eva(**SMALL, use_abs_pos_emb=False), abs_pos="drop")
    with pytest.raises(TypeError, match=r"got 'vit_tiny' of type str: create the model first, with timm.create_model"):
        relvit.retrofit("vit_tiny")


@pytest.mark.parametrize(("case", "options"), [("clip", {}), ("naflex", {"embed_proj_type": "linear"})])
def test_images_that_do_not_fit(case, options):
    model = relvit.retrofit(build(case, **options))
    with pytest.raises(ValueError, match="image width 20 is not a multiple of the patch size 8: use 16 or 24"):
        model(torch.zeros(1, 3, 16, 20, dtype=torch.float64))
