"""Attention-free models: the paper's sizes, its computation block by block, every image size."""

import pytest
import timm
import torch
from vits import SMALL, groups_of, images

from relvit.ops import Grid

# Width, mixer, kernel and heads of 'conv', patch, and millions of parameters in table 4 of the paper.
FAMILY = {
    "relvit_aft_conv_tiny": (192, "conv", 11, 192, 16, None),
    "relvit_aft_conv_small": (384, "conv", 15, 384, 16, None),
    "relvit_aft_conv_tiny_k11_h32": (192, "conv", 11, 32, 16, 5.356),
    "relvit_aft_conv_tiny_k11_h192": (192, "conv", 11, 192, 16, 5.963),
    "relvit_aft_conv_small_k11_h16": (384, "conv", 11, 16, 16, 20.298),
    "relvit_aft_conv_small_k11_h384": (384, "conv", 11, 384, 16, 22.541),
    "relvit_aft_conv_small_k15_h384": (384, "conv", 15, 384, 16, 23.021),
    "relvit_aft_conv_tiny_patch4_32": (192, "conv", 11, 192, 4, None),
    "relvit_aft_conv_small_patch4_32": (384, "conv", 11, 384, 4, None),
    "relvit_aft_full_tiny": (192, "full", None, 1, 16, 6.323),
    "relvit_aft_full_small": (384, "full", None, 1, 16, 22.656),
    "relvit_aft_local_tiny": (192, "local", None, 1, 16, None),
    "relvit_aft_local_small": (384, "local", None, 1, 16, None),
    "relvit_aft_simple_tiny": (192, "simple", None, 1, 16, None),
    "relvit_aft_simple_small": (384, "simple", None, 1, 16, None),
    "test_relvit_aft": (64, "conv", 5, 2, 16, None),
}
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


@pytest.mark.parametrize("name", FAMILY)
def test_registered_models_are_what_they_say(name):
    width, mixer, kernel, heads, patch, millions = FAMILY[name]
    with torch.device("meta"):
        # The depth of the others is that of these: all have the same.
        model = timm.create_model(name, **({} if millions else {"depth": 1}))
    attn = model.blocks[0].attn
    assert type(attn).__name__ == {"conv": "AFTConv2d"}.get(mixer, f"AFT{mixer.title()}")
    assert (model.embed_dim, attn.num_heads, model.patch_embed.patch_size) == (width, heads, (patch, patch))
    assert getattr(attn, "kernel_size", None) == (kernel and (kernel, kernel))
    assert getattr(attn, "window", None) == ((4, 4) if mixer == "local" else None)
    conv = mixer == "conv"
    assert (model.has_class_token, model.global_pool) == ((False, "avg") if conv else (True, "token"))
    assert (model.pos_embed is None) == conv
    if millions is not None:
        assert len(model.blocks) == 12
        assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 3) == millions


def test_all_registered_models_are_in_the_list():
    assert set(timm.list_models("*relvit_aft*")) == set(FAMILY)


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


@pytest.mark.parametrize("mixer", MIXERS)
def test_groups_of_parameters(mixer):
    groups = groups_of(build(mixer))
    own = [name for name in groups if name.split(".")[-1] in ("u", "v", "kernel", "gamma", "beta")]
    assert len(own) == {"conv": 9, "simple": 0}.get(mixer, 6)
    for name in own:
        assert groups[name] == (0.5 ** (3 - int(name.split(".")[1])), 0.0)


def test_errors():
    cases = [
        (ValueError, r"mixer is 'cnov'; allowed are .* \(did you mean 'conv'\?\)", {"mixer": "cnov"}),
        (ValueError, "window is for mixer 'local', got window=3 with mixer 'conv'", {"window": 3}),
        (ValueError, "kernel_size is for mixer 'conv'", {"mixer": "full", "kernel_size": 3}),
        (ValueError, "qk_norm cannot be chosen: there is no attention", {"qk_norm": True}),
        (ValueError, "rel_terms cannot be chosen: it is for relvit's models with attention", {"rel_terms": "kv"}),
        (TypeError, r"has no argument 'kernel_sise' \(did you mean 'kernel_size'\?\)", {"kernel_sise": 3}),
        (ValueError, "global_pool 'token' needs class_token=True", {"global_pool": "token"}),
    ]
    for kind, message, options in cases:
        with pytest.raises(kind, match=message):
            timm.create_model("test_relvit_aft", **{**SMALL, **options})
