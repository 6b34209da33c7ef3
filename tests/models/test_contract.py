"""The contract with timm: all that its `VisionTransformer` offers has a test here, and a model is what it says.

`COVERED` and `ARGUMENTS` name the test for each public name and each argument of timm's class. A version of timm with
another one makes `test_all_of_timms_vision_transformer_is_covered` fail, which says what is to be done. Compiled and
exported graphs are in `test_graphs.py`, TorchScript and symbolic tracing in `test_scripted.py`.
"""

import ast
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as tv
from vits import ATTENTION_FREE, NAMES, SMALL, assert_same, bias_for, images, precision, small, twins

from relvit.models.base import FIXED

FEATURES, TRAINING, WEIGHTS = "test_contract_features.py", "test_contract_training.py", "test_weights.py"
SAME = "test_contract.py::test_state_is_described_as_timm_describes_it"
OPTIONS = "test_contract.py::test_options_give_timms_numbers"
HEADS = f"{FEATURES}::test_features_head_and_pooling"
PREFIX = f"{FEATURES}::test_intermediates_in_every_form"
INIT = f"{TRAINING}::test_init_weights_in_every_mode"
DROPPED = "test_relative_vit.py::test_dropped_patches_keep_their_coordinates"
RESIZED = "test_contract.py::test_set_input_size"
RESET = "test_contract.py::test_reset_classifier"
CONFIGURED = "test_contract.py::test_default_cfgs"
DEVICES = f"{TRAINING}::test_made_without_memory_and_filled_later"

COVERED = {
    "attn_pool": HEADS,
    "blocks": f"{FEATURES}::test_pruning",
    "cls_token": PREFIX,
    "default_cfg": CONFIGURED,
    "dynamic_img_size": SAME,
    "embed_dim": SAME,
    "fc_norm": OPTIONS,
    "feature_info": f"{FEATURES}::test_features_only_are_the_intermediates",
    "fix_init": f"{TRAINING}::test_fix_init_scales_by_depth",
    "fix_init_weight": f"{TRAINING}::test_fix_init_scales_by_depth",
    "forward": OPTIONS,
    "forward_features": HEADS,
    "forward_head": HEADS,
    "forward_intermediates": PREFIX,
    "get_classifier": RESET,
    "get_intermediate_layers": f"{FEATURES}::test_get_intermediate_layers",
    "global_pool": HEADS,
    "grad_checkpointing": f"{TRAINING}::test_checkpointing_changes_neither_outputs_nor_gradients",
    "group_matcher": f"{TRAINING}::test_layer_decay_reaches_the_tables_of_each_block",
    "has_class_token": SAME,
    "head": RESET,
    "head_drop": f"{TRAINING}::test_dropouts_are_timms",
    "head_hidden_size": SAME,
    "in_chans": SAME,
    "init_weights": INIT,
    "load_pretrained": f"{WEIGHTS}::test_jax_archives",
    "no_embed_class": OPTIONS,
    "no_weight_decay": f"{TRAINING}::test_timm_relpos_defect_tables_are_decayed",
    "norm": OPTIONS,
    "norm_pre": OPTIONS,
    "num_classes": RESET,
    "num_features": SAME,
    "num_prefix_tokens": SAME,
    "num_reg_tokens": SAME,
    "patch_drop": DROPPED,
    "patch_embed": RESIZED,
    "pool": HEADS,
    "pool_include_prefix": OPTIONS,
    "pos_drop": f"{TRAINING}::test_dropouts_are_timms",
    "pos_embed": RESIZED,
    "pretrained_cfg": CONFIGURED,
    "pretrained_model_args": "test_hub.py::test_saved_and_loaded_as_it_was",
    "prune_intermediate_layers": f"{FEATURES}::test_pruning",
    "reg_token": PREFIX,
    "reset_classifier": RESET,
    "set_grad_checkpointing": f"{TRAINING}::test_checkpointing_changes_neither_outputs_nor_gradients",
    "set_input_size": RESIZED,
    "weight_init_mode": INIT,
}

ARGUMENTS = {
    "img_size": f"{FEATURES}::test_channels_and_sizes_of_images",
    "patch_size": RESIZED,
    "in_chans": f"{FEATURES}::test_channels_and_sizes_of_images",
    "num_classes": RESET,
    "global_pool": HEADS,
    "embed_dim": SAME,
    "depth": f"{FEATURES}::test_pruning",
    "class_token": PREFIX,
    "reg_tokens": PREFIX,
    "pos_embed": RESIZED,
    "dynamic_img_pad": "test_relative_vit.py::test_padding_to_whole_patches_is_an_option_and_otherwise_an_error",
    "drop_rate": f"{TRAINING}::test_dropouts_are_timms",
    "pos_drop_rate": f"{TRAINING}::test_dropouts_are_timms",
    "proj_drop_rate": f"{TRAINING}::test_dropouts_are_timms",
    "patch_drop_rate": DROPPED,
    "attn_drop_rate": f"{TRAINING}::test_attention_dropout_is_one_of_training",
    "drop_path_rate": f"{TRAINING}::test_drop_path_skips_blocks",
    "weight_init": INIT,
    "fix_init": f"{TRAINING}::test_fix_init_scales_by_depth",
    "device": DEVICES,
    "dtype": f"{TRAINING}::test_made_in_a_dtype",
    **dict.fromkeys(FIXED, "test_contract.py::test_misspelt_and_fixed_arguments"),
    **dict.fromkeys(
        ["num_heads", "mlp_ratio", "qkv_bias", "qk_norm", "scale_attn_norm", "scale_mlp_norm", "proj_bias"], OPTIONS
    ),
    **dict.fromkeys(["init_values", "no_embed_class", "pre_norm", "final_norm", "fc_norm"], OPTIONS),
    **dict.fromkeys(["pool_include_prefix", "embed_layer", "embed_norm_layer", "norm_layer", "act_layer"], OPTIONS),
    "mlp_layer": OPTIONS,
}


def public_names():
    model = VisionTransformer(**{**SMALL, "depth": 1})
    of_the_builder = {"pretrained_cfg", "default_cfg", "pretrained_model_args"}
    names = set(dir(model)) - set(dir(nn.Module())) | {"forward"} | of_the_builder
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize(
    ("offered", "table", "kind"),
    [
        (public_names(), COVERED, "public name"),
        (set(inspect.signature(VisionTransformer).parameters), ARGUMENTS, "argument"),
    ],
    ids=["names", "arguments"],
)
def test_all_of_timms_vision_transformer_is_covered(offered, table, kind):
    new, gone = sorted(offered - table.keys()), sorted(table.keys() - offered)
    todo = f"make relvit's models do the same, write a numeric test and add it to the table in {Path(__file__).name}"
    assert not new, f"timm {timm.__version__}: VisionTransformer has a new {kind} {new}: {todo}"
    assert not gone, f"timm {timm.__version__}: VisionTransformer has no {kind} {gone} any more: take it off the table"


def test_every_test_in_the_tables_is_there():
    for entry in {*COVERED.values(), *ARGUMENTS.values()}:
        file, test = entry.split("::")
        tree = ast.parse((Path(__file__).parent / file).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, entry


@pytest.mark.parametrize("name", [*NAMES, *ATTENTION_FREE])
def test_default_cfgs(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    cfg = model.pretrained_cfg
    assert cfg is model.default_cfg
    assert cfg["architecture"] == name
    assert cfg["input_size"] == (3, *model.patch_embed.img_size)
    imagenet, cifar = (
        ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    )
    for_cifar = name.endswith("_32")
    assert (cfg["mean"], cfg["std"]) == (cifar if for_cifar else imagenet)
    assert (cfg["interpolation"], cfg["license"]) == ("bicubic", "apache-2.0")
    assert cfg["num_classes"] == (10 if for_cifar else 1000)
    assert 0.87 < cfg["crop_pct"] <= 1
    assert cfg.get("fixed_input_size", False) is False
    assert cfg.get("pool_size") is None
    state = model.state_dict()
    assert state[f"{cfg['first_conv']}.weight"].shape[1] == 3
    assert state[f"{cfg['classifier']}.weight"].shape == (cfg["num_classes"], model.num_features)
    with pytest.raises(RuntimeError, match="No pretrained weights exist"):
        timm.create_model(name, pretrained=True, **{**SMALL, "depth": 1})


def test_transform_for_evaluation():
    config = resolve_model_data_config(small("relvit_small"))
    assert config["input_size"] == (3, 224, 224)  # as timm has it: that of the weights
    pixels = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    got = create_transform(**config, is_training=False)(picture)
    resized = tv.resize(picture, 248, InterpolationMode.BICUBIC)  # 224 / 0.9, rounded down
    expected = tv.normalize(tv.to_tensor(tv.center_crop(resized, 224)), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    torch.testing.assert_close(got, expected)


def test_state_is_described_as_timm_describes_it():
    model, plain = twins(class_token=True, reg_tokens=3, in_chans=5)
    for name in ("embed_dim", "num_features", "head_hidden_size", "num_classes", "in_chans", "num_prefix_tokens",
                 "num_reg_tokens", "has_class_token", "no_embed_class", "dynamic_img_size"):  # fmt: skip
        assert getattr(model, name) == getattr(plain, name), name
    assert (model.embed_dim, model.num_prefix_tokens, model.in_chans, model.dynamic_img_size) == (12, 4, 5, True)
    assert model.feature_info == plain.feature_info


class Squares(nn.ReLU):
    """An activation that is none of timm's."""

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
        {"num_classes": 0, "global_pool": ""},
    ],
    ids=str,
)
def test_options_give_timms_numbers(options):
    model, plain = twins(**options)
    x = images(16, 40, dtype=torch.float64)
    expected = plain(x, attn_mask=bias_for(plain, x))
    assert_same(model(x), expected, atol=precision(options))
    assert (expected - plain(x)).abs().max() > 1e-6  # the slopes were at work


@pytest.mark.parametrize("pool", [None, "max", "avg", "token", ""])
@pytest.mark.parametrize("num_classes", [0, 7])
def test_reset_classifier(pool, num_classes):
    model, plain = twins(class_token=True)
    x = images(16, 40, dtype=torch.float64)
    for net in (model, plain):
        torch.manual_seed(5)
        net.reset_classifier(num_classes, pool)
    assert model.num_classes == num_classes
    assert model.global_pool == plain.global_pool
    assert_same(model(x), plain(x, attn_mask=bias_for(plain, x)))
    assert model.get_classifier() is model.head
    if num_classes:
        assert model.get_classifier().weight.shape == (7, 12)
        assert model(x).shape[-1] == 7


def test_reset_classifier_takes_attention_pooling_away():
    model, plain = twins(global_pool="map")
    x = images(16, 40, dtype=torch.float64)
    for net in (model, plain):
        torch.manual_seed(5)
        net.reset_classifier(4, "avg")
    assert model.attn_pool is None
    assert_same(model(x), plain(x, attn_mask=bias_for(plain, x)))


@pytest.mark.parametrize("size", [{"img_size": 40}, {"img_size": (16, 48)}, {"patch_size": 4}, {"patch_size": (4, 8)},
                           {"img_size": (20, 12), "patch_size": 4}], ids=str)  # fmt: skip
@pytest.mark.parametrize("extra", [{}, {"class_token": True, "pos_embed": "learn"}], ids=str)
def test_set_input_size(size, extra):
    model, plain = twins(**extra)
    for net in (model, plain):
        net.set_input_size(**size)
    assert model.patch_embed.img_size == plain.patch_embed.img_size
    assert model.patch_embed.patch_size == plain.patch_embed.patch_size
    assert model.patch_embed.grid_size == plain.patch_embed.grid_size
    for x in (images(*model.patch_embed.img_size, dtype=torch.float64), images(16, 40, dtype=torch.float64)):
        assert_same(model(x), plain(x, attn_mask=bias_for(plain, x)), atol=precision(extra))


def test_misspelt_and_fixed_arguments():
    with pytest.raises(TypeError, match=r"VisionTransformer has no argument 'rel_term' \(did you mean 'rel_terms'\?\)"):
        small(rel_term="k")
    with pytest.raises(TypeError, match=r"has no argument 'drop_paths_rate' \(did you mean 'drop_path_rate'\?\)"):
        small(drop_paths_rate=0.1)
    for name in FIXED:
        with pytest.raises(ValueError, match=f"{name} cannot be chosen"):
            small(**{name: False})
    assert small(dynamic_img_size=True).dynamic_img_size
    with pytest.raises(ValueError, match=r"global_pool must be one of .*, got 'avgmx' \(did you mean 'avgmax'\?\)"):
        small(global_pool="avgmx")
    with pytest.raises(ValueError, match="global_pool 'token' needs class_token=True"):
        small(global_pool="token")


def test_numpy_integers_are_integers():
    sizes = {"img_size": (np.int64(24), np.int64(16)), "patch_size": np.int64(8), "num_classes": np.int64(5)}
    model = small(max_distance=(np.int64(2), np.int32(3)), **sizes).eval()
    assert_same(model(images()), small(max_distance=(2, 3)).eval()(images()), atol=0)
    assert model.blocks[0].attn.position.max_distance == (2, 3)
    assert json.dumps(model.blocks[0].attn.position.max_distance) == "[2, 3]"
