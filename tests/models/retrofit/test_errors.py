"""Models and arguments that cannot be retrofitted or restored: the error's reason, and the model stays unchanged."""

import operator
import re
import sys

import pytest
import timm
import torch
import torchvision
from beit_cases import hf_beit
from own_positions import mvit
from retrofit_cases import SMALL, build, fingerprint
from sam_cases import sam_encoder, sam_model, transformers
from timm.models.eva import Eva
from timm.models.maxxvit import MaxxVit, MaxxVitCfg
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchvision.models.video.mvit import MSBlockConfig, MViT

import relvit
from relvit.layers import SlopePosition2d

SWIN = {"image_size": 24, "embed_dim": 12, "depths": [1], "num_heads": [2], "window_size": 3}
COARSE_KEYS = {
    "patch_kernel": (3, 3),
    "patch_stride": (2, 2),
    "patch_padding": (1, 1),
    "depths": (1,),
    "embed_dim": (6,),
    "num_heads": (1,),
    "stride_q": ((1, 1),),
    "stride_kv": ((4, 4),),
}
BLOCK_OF_VIDEOS = MSBlockConfig(1, 8, 8, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2])


class Mine(VisionTransformer):
    pass


def plain(**kwargs):
    return VisionTransformer(**{**SMALL, **kwargs})


def with_one_other_attention():
    """The last block cannot be retrofitted, so all blocks before it must stay unchanged."""
    model = plain()
    model.blocks[1].attn = plain(attn_layer="diff").blocks[1].attn
    return model


def spoilt(model, path, value):
    """Return a model with one changed attribute or module."""
    owner, _, name = path.rpartition(".")
    setattr(operator.attrgetter(owner)(model) if owner else model, name, value)
    return model


def adapted(model):
    peft = pytest.importorskip("peft", reason="pip install 'relvit[peft]' brings peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["attn.qkv"]))


def holder(**parts):
    return nn.ModuleDict(parts)


def hf_swin(family):
    library = transformers()
    return getattr(library, f"{family}Model")(getattr(library, f"{family}Config")(**SWIN))


MODELS = {
    "parallel": (
        lambda: plain(block_fn=ParallelScalingBlock),
        r"blocks\.0 is a timm\..*\.ParallelScalingBlock, which cannot be retrofitted; allowed: 'timm\..*\.Block'",
    ),
    "one differential": (
        with_one_other_attention,
        r"blocks\.1\.attn is a timm\..*\.DiffAttention, which .* allowed: 'timm\.layers\.attention\.Attention'",
    ),
    "another forward": (
        lambda: spoilt(plain(), "blocks.1.attn.forward", lambda x, **_: x),
        r"blocks\.1\.attn has a forward of its own, .* retrofit the model before you replace forward",
    ),
    "convolutions": (
        lambda: timm.create_model("test_resnet"),
        "ResNet cannot be retrofitted: retrofit takes timm's VisionTransformer, .*help.relvit.retrofit. lists all$",
    ),
    "a class of the same name": (
        lambda: torchvision.models.VisionTransformer(32, 16, 1, 2, 12, 12),
        "^torchvision's VisionTransformer cannot be retrofitted: retrofit takes timm's VisionTransformer, ",
    ),
    "others of its own": (
        lambda: holder(relative_position_bias=nn.Linear(1, 1)),
        r"it has relative positions of its own, relative_position_bias\.weight; help\(relvit\.retrofit\) lists",
    ),
    "other blocks": (
        lambda: MaxxVit(MaxxVitCfg((32,), (1,), ("M",), 16), img_size=56),
        "MaxxVit cannot be retrofitted: it has further kinds of blocks beside attention, such as convolutions$",
    ),
    "Swin V2's other implementation": (
        lambda: timm.create_model("swinv2_cr_tiny_224", embed_dim=12, depths=(1,), num_heads=(2,)),
        "SwinTransformerV2Cr cannot be retrofitted: it is another implementation of Swin V2, .* swinv2_",
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
        "SwinTransformer cannot be retrofitted: it is a Swin Transformer, whose windows have few tokens at every",
    ),
    "no positions": (lambda: build("beit", use_rel_pos_bias=False), r"blocks\.0\.attn has no relative positions"),
    "rotary SAM": (lambda: build("sam", use_rel_pos=False, use_rope=True), "build the model with its own"),
    "MViT that pools first": (
        lambda: mvit("patches", pool_first=True),
        r"0\.attn is a timm\..*\.MultiScaleAttentionPoolFirst, .* allowed: 'timm\..*\.MultiScaleAtt",
    ),
    "absolute MViT": (
        lambda: mvit("patches", use_abs_pos=True),
        "pos_embed: MViTv2 with an absolute embedding, .* use_abs_pos=False",
    ),
    # timm's models for 16 and for 17 px have tables for 8 x 8 patches, and compute images of 8 x 8 and of 9 x 9
    # patches.
    **{
        f"MViT of {side} px": (
            lambda side=side: mvit("patches", (side, side), **COARSE_KEYS),
            r"timm builds the same model for images of 16 and 17 px, and its offsets differ between them; choose a pa",
        )
        for side in (16, 17)
    },
    "MViT whose padding leaves out patches": (
        lambda: mvit("patches", patch_padding=(0, 0)),
        "timm builds the same model for images of 64 and 67 px",
    ),
    "MViT without positions": (
        lambda: mvit("patches", rel_pos_type=""),
        r"stages\.0\.blocks\.0\.attn has no relative positions, .* rel_pos_type='spatial'",
    ),
    "HF BEiT without positions": (
        lambda: hf_beit("hf beit", use_relative_position_bias=False),
        r"layers\.0\.attention has no relative positions",
    ),
    "HF BEiT for rectangles": (
        lambda: hf_beit("hf beit", image_size=(40, 24)),
        r"for 5 x 3 patches, which BeitModel reads with rows and columns",
    ),
    "another attention function": (
        lambda: spoilt(hf_beit("hf beit"), "config._attn_implementation", "flex_attention"),
        "attn_implementation is 'flex_attention'; allowed are 'eager', 'sdpa'",
    ),
    **{
        family: (lambda family=family: hf_swin(family), "is a Swin Transformer, whose windows have few tokens at")
        for family in ("Swin", "Swinv2", "MaskFormerSwin", "DonutSwin")
    },
    "HF DINOv2": (
        lambda: transformers().Dinov2Model(
            transformers().Dinov2Config(hidden_size=24, num_hidden_layers=1, num_attention_heads=2)
        ),
        r"Dinov2Model cannot be retrofitted: .* weights of this family: timm\.list_pretrained\('\*_dinov2\*'\)",
    ),
    "overlapping patches": (
        lambda: spoilt(sam_encoder("segment_anything"), "patch_embed.proj.stride", (4, 4)),
        r"patch_embed\.proj has kernel size \(8, 8\), stride \(4, 4\) and padding \(0, 0\): relvit\.retrofit takes",
    ),
    "SAM without positions": (
        lambda: sam_encoder("segment_anything", use_rel_pos=False),
        r"blocks\.0\.attn has no relative positions, .* build the model with its own",
    ),
    "SAM's attention": (
        lambda: spoilt(sam_encoder("segment_anything"), "blocks.2.attn", nn.Identity()),
        r"blocks\.2\.attn is a torch\..*\.Identity, which .* allowed: 'segment_anything\..*\.Attention'",
    ),
    "whole SAM": (sam_model, r"it wraps vision_encoder, a SamVisionEncoder: .* model\.vision_encoder"),
    # MONAI's CellSamWrapper holds a SAM of `segment_anything` in this way.
    "two levels deep": (
        lambda: holder(model=holder(image_encoder=sam_encoder("segment_anything"))),
        r"it wraps model\.image_encoder, an ImageEncoderViT: retrofit that one in it, model\.model\.image_encoder",
    ),
    "in a list": (
        lambda: nn.Sequential(nn.Identity(), nn.ModuleList([plain()])),
        r"it wraps 1\.0, a VisionTransformer: retrofit that one in it, model\[1\]\[0\]",
    ),
    "taken apart": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", features_only=True, embed_dim=12, depths=(1,) * 4),
        r"features_only=True has taken the model apart: timm.create_model\('retrofitted', model=NAME, features_only=T",
    ),
    "timm's wrapper in another": (
        lambda: nn.Sequential(timm.create_model("test_vit", features_only=True)),
        r"it wraps 0\.model, a VisionTransformer: retrofit that one before it is wrapped",
    ),
    **{
        # These wrappers have read the model's parameters: DistributedDataParallel, in the same folder of PyTorch as
        # DataParallel, would not average the gradients of later tables, and PEFT would not save later tables.
        wrapper: (wrap, rf"it wraps {inner}, a VisionTransformer: retrofit that one before it is wrapped$")
        for wrapper, wrap, inner in (
            ("in parallel", lambda: nn.DataParallel(plain()), "module"),
            ("averaged", lambda: AveragedModel(holder(vit=plain())), r"module\.vit"),
            ("with adapters", lambda: adapted(plain()), r"base_model\.model"),
        )
    },
    "done in it": (
        lambda: holder(net=holder(vit=relvit.retrofit(plain()))),
        r"ModuleDict cannot be retrofitted: net\.vit in it has been retrofitted already",
    ),
    "quantised": (
        lambda: torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear}),
        r"blocks\.0\.attn\.proj is quantised: retrofit the model before it is quantised",
    ),
    "own adapters": (
        lambda: spoilt(plain(), "blocks.1.attn.proj", nn.Sequential(nn.Linear(12, 12))),
        r"blocks\.1\.attn\.proj is a torch\..*\.Sequential without a weight: retrofit the model before you replace its",
    ),
    "embedding": (
        lambda: plain(embed_layer=type("MyEmbed", (timm.layers.PatchEmbed,), {})),
        r"patch_embed is a .*\.MyEmbed, which cannot be retrofitted; allowed: 'timm\.layers\.patch_embed\.PatchEmbed'",
    ),
}
ARGUMENTS = [
    ({"rel_terms": "kz"}, ValueError, "each at most once, got 'kz'"),
    ({"rel_term": "k"}, TypeError, r"retrofit has no argument 'rel_term' \(did you mean 'rel_terms'\?\)"),
    ({"max_dist": 3}, TypeError, "did you mean 'max_distance'"),
    ({"rel_init_std": 0.02}, TypeError, "did you mean 'init_std'"),
    ({"colour": 1}, TypeError, "has no argument 'colour', allowed: 'model', 'rel_terms', "),
    ({"max_distance": -1}, ValueError, "max_distance must be at least 0"),
    ({"init_std": "x"}, TypeError, "init_std must be a number, got str"),
    ({"abs_pos": "dropp"}, ValueError, r"allowed are 'keep', 'freeze', 'drop' \(did you mean 'drop'"),
    ({"backend": "fussed"}, ValueError, "did you mean 'fused'"),
    ({"max_grid": 32}, ValueError, "max_grid is for NaFlexVit, got 32 for VisionTransformer: leave max_grid out"),
    (
        {"position": SlopePosition2d, "rel_terms": "k"},
        ValueError,
        r"rel_terms='k' is for positions known by name; .*functools.partial\(YourPosition, rel_terms=\.\.\.\)",
    ),
    ({"position": nn.Linear}, TypeError, "position Linear cannot be called with a Grid"),
    ({"position": lambda *_args, **_kwargs: nn.Identity()}, TypeError, "Identity must return RelativeTerms, got Grid"),
    ({"position": SlopePosition2d(4, 2)}, TypeError, "position must make a module of its own for every block"),
    ({"rel_terms": "k"}, ValueError, "rel_terms='k' is for models without relative positions"),
    ({"position": "xl"}, ValueError, "position='xl' is for models without relative positions"),
    ({"abs_pos": "drop"}, ValueError, "this Beit has no absolute embedding"),
    ({"position": "slops"}, ValueError, r"position is 'slops'; allowed are 'tables'.* .did you mean 'slopes'"),
]


def retrofitted_sam():
    model = sam_model()
    relvit.retrofit(model.vision_encoder)
    return model


RESTORED = {
    "not retrofitted": (lambda: build("sam"), "VisionTransformerSAM has not been retrofitted$"),
    "a deeper part is": (
        lambda: holder(model=retrofitted_sam()),
        r"its model\.vision_encoder has: relvit\.restore\(model\.model\.vision_encoder\)",
    ),
    "a part is": (retrofitted_sam, r"its vision_encoder has: relvit\.restore\(model\.vision_encoder\)"),
    "added tables": (
        lambda: relvit.retrofit(build("dinov2")),
        "no place for the tables that retrofit added; build the original",
    ),
    **{
        f"{case} dropped": (
            lambda case=case: relvit.retrofit(build(case), abs_pos="drop"),
            "cannot be restored: abs_pos='drop' has removed pos_embed; build the original model again",
        )
        for case in ("sam absolute", "beit both")
    },
    "sums": (
        lambda: relvit.retrofit(build("beit both")),
        r"added blocks\.0\.attn\.relative_position_bias_table to the tables of blocks\.0\.attn; build",
    ),
}
REFUSED = [(relvit.retrofit, *case) for case in MODELS.values()] + [
    (relvit.restore, *case) for case in RESTORED.values()
]


@pytest.mark.parametrize(("call", "make", "message"), REFUSED, ids=[*MODELS, *RESTORED])
def test_models_that_are_refused(call, make, message):
    model = make()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message) as caught:
        call(model)
    assert len(str(caught.value)) < 280
    assert fingerprint(model) == before


def test_compiled_graphs_of_hugging_face_models_show_no_weights(monkeypatch):
    pytest.importorskip("transformers", reason="pip install 'relvit[elsewhere]' brings transformers")
    from relvit.models.retrofit.sources import hugging_face

    monkeypatch.setattr(hugging_face, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="compiled graphs form no attention weights; leave it out, or call"):
        hugging_face.attend_and_show(None, None, None, None, show=True)


def test_versions_that_are_not_known(monkeypatch):
    encoder = sam_encoder("hf sam")
    monkeypatch.setattr(sys.modules["relvit.models.retrofit.recognise"], "version", lambda library: "4.57.6")
    with pytest.raises(ValueError, match=r"is of transformers 4\.57\.6: retrofit needs transformers>=5\.4"):
        relvit.retrofit(encoder)


@pytest.mark.parametrize(("kwargs", "kind", "message"), ARGUMENTS, ids=[str(i) for i in range(len(ARGUMENTS))])
def test_arguments_that_are_refused(kwargs, kind, message):
    model = build("beit") if "Beit" in message or "without relative positions" in message else plain()
    before = fingerprint(model)
    with pytest.raises(kind, match=message):
        relvit.retrofit(model, **kwargs)
    assert fingerprint(model) == before
    relvit.retrofit(model)


def test_what_only_some_models_have():
    model = build("naflex")
    with pytest.raises(ValueError, match=re.escape("max_grid must be an int or (rows, columns), got (1, 2, 3)")):
        relvit.retrofit(model, max_grid=(1, 2, 3))
    assert relvit.retrofit(model).max_grid == (64, 64)
    with pytest.raises(ValueError, match="abs_pos='drop': this Eva has no absolute embedding, leave abs_pos out"):
        relvit.retrofit(Eva(**SMALL, use_abs_pos_emb=False), abs_pos="drop")


@pytest.mark.parametrize(("case", "options"), [("clip", {}), ("naflex", {"embed_proj_type": "linear"})])
def test_images_that_do_not_fit(case, options):
    model = relvit.retrofit(build(case, **options))
    with pytest.raises(ValueError, match="image width 20 is not a multiple of the patch size 8: use 16 or 24"):
        model(torch.zeros(1, 3, 16, 20, dtype=torch.float64))
