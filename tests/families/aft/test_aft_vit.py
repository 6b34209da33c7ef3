"""Attention-free models: sizes in the paper, the computation block by block, every image size."""

import re

import pytest
import timm
import torch
from vits import SMALL, images

from relvit.ops import Grid

# Table 7 of the paper has these millions of parameters.
PAPER = {
    "relvit_aft_conv_tiny_k11_h32": 5.356,
    "relvit_aft_conv_tiny_k11_h192": 5.963,
    "relvit_aft_conv_small_k11_h16": 20.298,
    "relvit_aft_conv_small_k11_h384": 22.541,
    "relvit_aft_conv_small_k15_h384": 23.021,
    "relvit_aft_full_tiny": 6.323,
    "relvit_aft_full_small": 22.656,
}
OTHERS = [f"{mixer}_{size}" for mixer in ("local", "simple", "conv") for size in ("tiny", "small")]
OTHERS = [f"relvit_aft_{name}" for name in (*OTHERS, "conv_tiny_patch4_32", "conv_small_patch4_32")]
# These are the kernel size and the number of heads of 'conv' models whose names do not contain them.
CONV = {"tiny": (11, 192), "small": (15, 384), "tiny_patch4_32": (11, 192), "small_patch4_32": (11, 384)}
MIXERS = {
    "conv": {"kernel_size": (3, 5)},
    "full": {"bias_dim": 5},
    "local": {"bias_dim": 5, "window": (1, 2)},
    "simple": {},
}


def build(mixer="conv", **options):
    torch.manual_seed(0)
    model = timm.create_model("test_relvit_aft", **{**SMALL, "mixer": mixer, **MIXERS[mixer], **options})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("name", [*PAPER, *OTHERS])
def test_registered_models_are_what_they_say(name):
    with torch.device("meta"):
        # Models that are not in the paper are as deep as its models, so one block is enough for them.
        model = timm.create_model(name, **({} if name in PAPER else {"depth": 1}))
    mixer, size = name.split("_")[2:4]
    attn, patch = model.blocks[0].attn, 4 if "patch4" in name else 16
    assert type(attn).__name__ == {"conv": "AFTConv2d"}.get(mixer, f"AFT{mixer.title()}")
    assert (model.embed_dim, model.patch_embed.patch_size) == ({"tiny": 192, "small": 384}[size], (patch, patch))
    variant = name.removeprefix("relvit_aft_conv_")
    kernel, heads = map(int, re.findall("_[kh]([0-9]+)", name)) if "_h" in name else CONV.get(variant, (None, 1))
    assert (getattr(attn, "kernel_size", None), attn.num_heads) == (kernel and (kernel, kernel), heads)
    assert getattr(attn, "window", None) == ((4, 4) if mixer == "local" else None)
    assert (model.has_class_token, model.global_pool) == ((False, "avg") if kernel else (True, "token"))
    assert (model.pos_embed is None) == (mixer == "conv")
    if name in PAPER:
        assert len(model.blocks) == 12
        assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 3) == PAPER[name]


def test_all_registered_models_are_in_the_list():
    assert set(timm.list_models("*relvit_aft*")) == {*PAPER, *OTHERS, "test_relvit_aft"}


@pytest.mark.parametrize("global_pool", ["map", "prr"])
def test_the_heads_of_an_attention_pool_are_not_those_of_the_mixer(global_pool):
    options = {"depth": 1, "global_pool": global_pool, "device": "meta"}
    model = timm.create_model("relvit_aft_conv_small", **options)
    assert (model.attn_pool.num_heads, model.blocks[0].attn.num_heads) == (6, 384)
    odd = build(num_heads=2, global_pool=global_pool)
    assert (odd.attn_pool.num_heads, odd.blocks[0].attn.num_heads) == (1, 2)
    assert odd(images()).isfinite().all()


@pytest.mark.parametrize("mixer", MIXERS)
def test_features_are_the_papers_blocks(mixer):
    """The mixers themselves are compared with the paper's equations in `tests/families/aft/test_mixers.py`."""
    model = build(mixer, depth=2, reg_tokens=1).double().eval()
    x = images(batch=1, dtype=torch.float64)
    tokens = model.patch_embed.proj(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([t for t in (model.cls_token, model.reg_token) if t is not None] + [tokens], dim=1)
    if model.pos_embed is not None:
        tokens = tokens + model.pos_embed
    for block in model.blocks:
        tokens = tokens + block.attn(block.norm1(tokens), Grid(3, 2, model.num_prefix_tokens))
        tokens = tokens + block.mlp(block.norm2(tokens))
    torch.testing.assert_close(model.forward_features(x), model.norm(tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize("mixer", MIXERS)
def test_any_size_equals_a_model_set_to_that_size(mixer):
    size = (16, 40)
    model, x = build(mixer).double().eval(), images(*size, dtype=torch.float64)
    before = model(x)
    model.set_input_size(size)
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-6 if model.pos_embed is not None else 1e-12)
    if mixer == "conv":
        other = build(mixer, img_size=size).double().eval()
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(x), before, rtol=0, atol=0)


def test_errors():
    cases = [
        (ValueError, r"mixer is 'cnov'; allowed are .* \(did you mean 'conv'\?\)", {"mixer": "cnov"}),
        (ValueError, "window is for mixer 'local', got window=3 with mixer 'conv': leave window out", {"window": 3}),
        (ValueError, "kernel_size is for mixer 'conv'", {"mixer": "full", "kernel_size": 3}),
        (ValueError, "qk_norm cannot be chosen: there is no attention", {"qk_norm": True}),
        (ValueError, "rel_terms cannot be chosen: it is for relvit's models with attention", {"rel_terms": "kv"}),
        (TypeError, r"has no argument 'kernel_sise' \(did you mean 'kernel_size'\?\)", {"kernel_sise": 3}),
        (ValueError, "global_pool 'token' needs class_token=True", {"global_pool": "token"}),
    ]
    for kind, message, options in cases:
        with pytest.raises(kind, match=message):
            timm.create_model("test_relvit_aft", **{**SMALL, **options})
