"""Options of timm's `VisionTransformer`: relvit's outputs equal those of timm's model with ALiBi's slopes as a mask."""

import numpy as np
import pytest
import timm
import torch
from timm_versions import since
from torch import nn
from vits import assert_same, bias_for, class_of, images, precision, small, twins

from relvit.models.entry_points import FIXED


@pytest.fixture(scope="module", params=timm.list_models("*relvit*"))
def registered(request):
    """Return a registered name, and its model with one block."""
    return request.param, timm.create_model(request.param, depth=1, device="meta")


def test_every_class_has_a_small_model_for_tests():
    classes = [{class_of(name) for name in timm.list_models(pattern)} for pattern in ("relvit_*", "test_relvit*")]
    assert classes[0] == classes[1]


def test_default_cfgs_describe_the_model_that_they_build(registered):
    name, model = registered
    cfg, state = model.pretrained_cfg, model.state_dict()
    assert cfg is model.default_cfg
    assert cfg["architecture"] == name
    assert cfg["input_size"] == (3, *model.patch_embed.img_size)
    assert state[f"{cfg['first_conv']}.weight"].shape[1] == 3
    assert state[f"{cfg['classifier']}.weight"].shape == (cfg["num_classes"], model.num_features)


def test_default_cfgs_have_the_classes_and_the_normalisation_of_cifar_or_of_imagenet(registered):
    name, model = registered
    cfg, for_cifar = model.pretrained_cfg, name.endswith("_32")
    assert cfg["num_classes"] == (10 if for_cifar else 1000)
    assert cfg["mean"] == ((0.4914, 0.4822, 0.4465) if for_cifar else (0.485, 0.456, 0.406))
    assert cfg["std"] == ((0.2470, 0.2435, 0.2616) if for_cifar else (0.229, 0.224, 0.225))


def test_default_cfgs_allow_any_size_with_the_usual_crop(registered):
    cfg = registered[1].pretrained_cfg
    assert (cfg["interpolation"], cfg["license"]) == ("bicubic", "apache-2.0")
    assert 0.87 < cfg["crop_pct"] <= 1
    assert cfg.get("fixed_input_size", False) is False
    assert cfg.get("pool_size") is None


def test_state_is_described_as_timm_describes_it():
    model, plain = twins(class_token=True, reg_tokens=3, in_chans=5)
    for name in ("embed_dim", "num_features", "head_hidden_size", "num_classes", "in_chans", "num_prefix_tokens",
                 "num_reg_tokens", "has_class_token", "no_embed_class", "dynamic_img_size"):  # fmt: skip
        assert getattr(model, name) == getattr(plain, name), name
    assert (model.embed_dim, model.num_prefix_tokens, model.in_chans, model.dynamic_img_size) == (12, 4, 5, True)
    assert model.feature_info == plain.feature_info


class Squares(nn.ReLU):
    """An activation that timm does not have."""

    def forward(self, x):
        return super().forward(x).square()


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": True, "qkv_bias": False, "proj_bias": False, "num_heads": 2},
        {"scale_attn_norm": True, "scale_mlp_norm": True, "mlp_ratio": 2},
        {"init_values": 0.1, "pre_norm": True},
        {"final_norm": False},
        {"fc_norm": False},
        {"fc_norm": True, "class_token": True, "global_pool": "token"},
        {"class_token": True, "pos_embed": "learn", "no_embed_class": True},
        {"class_token": True, "pos_embed": "learn", "reg_tokens": 2},
        {"class_token": True, "pool_include_prefix": True},
        {"norm_layer": "rmsnorm", "act_layer": "silu", "embed_norm_layer": "layernorm"},
        {"mlp_layer": timm.layers.SwiGLU, "act_layer": Squares, "embed_layer": timm.layers.PatchEmbed},
        {"num_classes": 0, "global_pool": "", "in_chans": 3, "img_size": 32},
    ],
    ids=str,
)
def test_options_give_timms_numbers(options):
    model, plain = twins(**options)
    x = images(16, 40, dtype=torch.float64)
    expected = plain(x, attn_mask=bias_for(plain, x))
    assert_same(model(x), expected, atol=precision(options))
    assert (expected - plain(x)).abs().max() > 1e-6  # The slopes have changed the outputs.


@pytest.mark.parametrize(
    ("before", "num_classes", "pool"),
    [("avg", 7, None), ("avg", 7, "max"), ("avg", 7, "token"), ("avg", 0, ""), ("map", 4, "avg")],
)
def test_reset_classifier(before, num_classes, pool):
    since("1.0.29")
    model, plain = twins(class_token=True, global_pool=before)
    x = images(16, 40, dtype=torch.float64)
    for net in (model, plain):
        torch.manual_seed(5)
        net.reset_classifier(num_classes, pool)
    assert (model.num_classes, model.global_pool) == (num_classes, plain.global_pool)
    assert_same(model(x), plain(x, attn_mask=bias_for(plain, x)))
    assert model.get_classifier() is model.head
    assert model(x).shape[-1] == (num_classes or 12)
    assert (model.attn_pool is None) == (plain.attn_pool is None)


@pytest.mark.parametrize("size", [{"img_size": 40}, {"patch_size": (4, 8)}, {"img_size": (20, 12), "patch_size": 4}])
@pytest.mark.parametrize("extra", [{}, {"class_token": True, "pos_embed": "learn"}], ids=str)
def test_set_input_size(size, extra):
    model, plain = twins(**extra)
    for net in (model, plain):
        net.set_input_size(**size)
    for name in ("img_size", "patch_size", "grid_size"):
        assert getattr(model.patch_embed, name) == getattr(plain.patch_embed, name)
    for x in (images(*model.patch_embed.img_size, dtype=torch.float64), images(16, 40, dtype=torch.float64)):
        assert_same(model(x), plain(x, attn_mask=bias_for(plain, x)), atol=precision(extra))


def test_pretrained_misspelt_and_fixed_arguments():
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        small(pretrained=True)
    with pytest.raises(TypeError, match=r"VisionTransformer has no argument 'rel_term' \(did you mean 'rel_terms'\?\)"):
        small(rel_term="k")
    with pytest.raises(TypeError, match=r"has no argument 'drop_paths_rate' \(did you mean 'drop_path_rate'\?\)"):
        small(drop_paths_rate=0.1)
    for name in FIXED:
        with pytest.raises(ValueError, match=f"{name} cannot be chosen"):
            small(**{name: False})
    assert small(dynamic_img_size=True).dynamic_img_size
    with pytest.raises(ValueError, match=r"global_pool is 'avgmx'; allowed are .* \(did you mean 'avgmax'\?\)"):
        small(global_pool="avgmx")
    with pytest.raises(ValueError, match="global_pool 'token' needs class_token=True"):
        small(global_pool="token")


def test_numpy_integers_are_integers():
    sizes = {"img_size": (np.int64(24), np.int64(16)), "patch_size": np.int64(8), "num_classes": np.int64(5)}
    model = small(max_distance=(np.int64(2), np.int32(3)), **sizes).eval()
    assert_same(model(images()), small(max_distance=(2, 3)).eval()(images()), atol=0)
    assert all(type(number) is int for number in model.blocks[0].attn.position.max_distance)
