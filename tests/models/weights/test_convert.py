"""Converted checkpoints: the loaded model computes the same as the model that the checkpoint was saved from."""

import numpy as np
import pytest
import timm
import torch
from timm.layers import GluMlp, resample_abs_pos_embed
from timm.models import load_checkpoint
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from vits import SMALL, assert_same, bias_for, images, small

from relvit.models import RelVisionTransformer, Weights, checkpoint_filter_fn, transfer_weights

VIT = {"class_token": True, "global_pool": "token", "pos_embed": "learn"}
SINGLE = 1e-6  # timm interpolates absolute embeddings in single precision.
CFG = {"input_size": (3, 24, 16), "num_classes": 5}


def foreign(**options):
    """Build timm's Vision Transformer with large random parameters, in float64."""
    torch.manual_seed(2)
    model = VisionTransformer(**{**SMALL, "mlp_ratio": 3, "dynamic_img_size": True, **options})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def load(state, **options):
    """Load these weights into a relvit model as timm loads pretrained weights, in float64."""
    overlay = {**CFG, "state_dict": state, **options.pop("overlay", {})}
    torch.manual_seed(3)
    options = {**SMALL, "dtype": torch.float64, **options}
    return timm.create_model("test_relvit", pretrained=True, pretrained_cfg_overlay=overlay, **options).eval()


def wide(*size, channels=3):
    return images(*size, channels=channels, dtype=torch.float64)


def test_a_plain_vision_transformer_gives_its_own_outputs(tmp_path):
    plain = foreign()
    torch.save({"model": plain.state_dict()}, tmp_path / "deit.pth")
    for terms in ("kv", "qkvb", ""):
        model = load(None, overlay={"file": str(tmp_path / "deit.pth")}, rel_terms=terms, **VIT)
        assert all(table.eq(0).all() for name, table in model.named_parameters() if ".position." in name)
        assert_same(model(wide(24, 16)), plain(wide(24, 16)))
        assert_same(model(wide(16, 40)), plain(wide(16, 40)), atol=SINGLE)
    # If only the model has layer scale, the scale becomes one.
    assert_same(load(plain.state_dict(), init_values=1e-5, **VIT)(wide(24, 16)), plain(wide(24, 16)))


def test_load_checkpoint_and_a_state_dict_wrapped_twice(tmp_path):
    plain, path = foreign(), str(tmp_path / "wrapped.pth")
    torch.save({"state_dict": {f"module.{k}": v for k, v in plain.state_dict().items()}}, path)
    model = small(**VIT).double().eval()
    load_checkpoint(model, path, filter_fn=checkpoint_filter_fn)
    assert_same(model(wide(24, 16)), plain(wide(24, 16)))
    model = small(**VIT).double().eval()
    model.load_state_dict(checkpoint_filter_fn({"model": {"state_dict": plain.state_dict()}}, model))
    assert_same(model(wide(24, 16)), plain(wide(24, 16)))
    # timm's checkpoint_path needs the weights of exactly this model, and names the missing ones.
    with pytest.raises(RuntimeError, match=r"blocks\.0\.attn\.position\.key_rows"):
        timm.create_model("test_relvit", checkpoint_path=path, **SMALL, **VIT)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_deit_iii(scale):
    plain = foreign(init_values=0.1, no_embed_class=True)
    state = {
        name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): tensor
        for name, tensor in plain.state_dict().items()
    }
    assert "blocks.0.gamma_1" in state
    model = load(state, no_embed_class=True, init_values=scale, **VIT)
    assert ("blocks.0.ls1.gamma" in model.state_dict()) == (scale is not None)
    assert_same(model(wide(16, 40)), plain(wide(16, 40)), atol=SINGLE)
    # The checkpoint has an embedding of patches only, the model's embedding has an entry for the class token.
    model = load(state, init_values=scale, **VIT)
    assert model.pos_embed.shape == (1, 7, 12)
    assert_same(model(wide(24, 16)), plain(wide(24, 16)))


def test_half_precision_checkpoints_are_converted_without_rounding():
    plain = foreign(init_values=0.1)
    for name, parameter in plain.named_parameters():
        if name.endswith("gamma"):
            nn.init.normal_(parameter, std=1e-6)
    state = plain.half().state_dict()
    # In float16 most products of layer scale and weights would be zero.
    model = load(state, **VIT)
    expected = plain.double().blocks[1].mlp.fc2.weight * plain.blocks[1].ls2.gamma[:, None]
    torch.testing.assert_close(model.blocks[1].mlp.fc2.weight, expected, rtol=1e-12, atol=0)
    assert_same(model(wide(24, 16)), plain(wide(24, 16)))
    source = small(max_distance=2, rel_terms="kb").double().eval().bfloat16()
    model = load(source.state_dict(), max_distance=2, rel_terms="kb", layout="joint")
    assert_same(model(wide(16, 40)), source.double()(wide(16, 40)))


def test_distilled_deit_without_its_second_token(caplog):
    plain = foreign()
    state = dict(plain.state_dict())
    torch.manual_seed(0)
    position = state["pos_embed"]
    state["pos_embed"] = torch.cat((position[:, :1], torch.randn(1, 1, 12), position[:, 1:]), dim=1)
    state["dist_token"] = torch.randn(1, 1, 12)
    state["head_dist.weight"], state["head_dist.bias"] = torch.randn(5, 12), torch.randn(5)
    state["pre_logits.fc.weight"] = torch.randn(12, 12)
    assert_same(load(state, **VIT)(wide(24, 16)), plain(wide(24, 16)))
    caplog.clear()
    load(state)
    assert "has no use for it: cls_token, dist_token, head_dist.bias, head_dist.weight, pos_embed" in caplog.text


def test_registers_and_their_part_of_the_embedding():
    plain = foreign(reg_tokens=2)
    assert_same(load(plain.state_dict(), reg_tokens=2, **VIT)(wide(24, 16)), plain(wide(24, 16)))
    # If the model's embedding has no entries for prefix tokens, the checkpoint's entries are added to the prefix
    # tokens.
    model = load(plain.state_dict(), reg_tokens=2, no_embed_class=True, **VIT)
    assert model.pos_embed.shape == (1, 6, 12)
    assert_same(model(wide(24, 16)), plain(wide(24, 16)))


def test_registers_of_a_model_on_another_device_than_the_checkpoint():
    model = small(reg_tokens=2, **VIT).to("meta")
    embedding = checkpoint_filter_fn(foreign().state_dict(), model)["pos_embed"]
    assert (embedding.device.type, embedding.dtype, embedding.shape) == ("cpu", torch.float64, (1, 9, 12))


def test_absolute_embedding_resampled_or_left_out():
    plain = foreign()
    model = load(plain.state_dict(), **{**VIT, "img_size": (16, 40)})
    expected = resample_abs_pos_embed(plain.pos_embed, (2, 5), (3, 2), num_prefix_tokens=1)
    assert_same(model.pos_embed.detach(), expected.detach())
    assert_same(model(wide(16, 40)), plain(wide(16, 40)), atol=SINGLE)
    model = load(plain.state_dict(), **{**VIT, "pos_embed": ""})
    with torch.no_grad():
        plain.pos_embed[:, 1:] = 0
    assert_same(model(wide(16, 40)), plain(wide(16, 40)))


@pytest.mark.parametrize("kind", ["axial", "axial-sum"])
def test_axial_tables(kind):
    source = small(pos_embed=kind).double().eval()
    model = load(source.state_dict(), pos_embed=kind, img_size=(16, 40))
    assert model.axial.grid_size == (2, 5)
    source.set_input_size((16, 40))
    assert_same(model(wide(16, 40)), source(wide(16, 40)))
    # A plain checkpoint has no tables, so the model's tables become zero.
    plain = foreign()
    with_zeros = load(plain.state_dict(), **{**VIT, "pos_embed": kind})
    assert_same(with_zeros(wide(16, 40)), load(plain.state_dict(), **{**VIT, "pos_embed": ""})(wide(16, 40)))


def test_the_grid_of_an_embedding_of_unknown_size():
    unknown = {"overlay": {"input_size": (3, 224, 224)}}
    plain = foreign(img_size=24)
    assert_same(load(plain.state_dict(), **unknown, **VIT)(wide(24, 16)), plain(wide(24, 16)), atol=SINGLE)
    # 2 x 8 patches are as many as 4 x 4: if the checkpoint's embedding is as long as the model's, it has the model's
    # grid.
    for extra in ({}, {"no_embed_class": True}):
        plain = foreign(img_size=(16, 64), **extra)
        model = load(plain.state_dict(), img_size=(16, 64), **unknown, **VIT, **extra)
        assert_same(model(wide(16, 64)), plain(wide(16, 64)))
    for extra in ({}, {"no_embed_class": True}):
        plain = foreign(img_size=(8, 88), **extra)
        state = plain.state_dict()
        with pytest.raises(
            ValueError, match=r"with or without prefix tokens \(1\) .* img_size and .* or .* input_size in"
        ):
            load(state, **unknown, **VIT)
        # The arguments that the error suggests work.
        assert_same(load(state, img_size=(8, 88), **unknown, **VIT)(wide(8, 88)), plain(wide(8, 88)))
        assert load(state, overlay={"input_size": (3, 8, 88)}, **VIT)(wide(24, 16)).shape == (2, 5)


def test_models_built_by_their_class_take_weights_without_timms_configuration():
    def build():
        return RelVisionTransformer(**{**SMALL, "mlp_ratio": 3}, **VIT).double().eval()

    plain, by_filter, by_transfer = foreign(), build(), build()
    by_filter.load_state_dict(checkpoint_filter_fn(plain.state_dict(), by_filter))
    transfer_weights(by_transfer, Weights("plain", plain.state_dict()))
    for model in (by_filter, by_transfer):
        assert_same(model(wide(24, 16)), plain(wide(24, 16)))
    with pytest.raises(ValueError, match="they fit no square grid; build the model"):
        checkpoint_filter_fn(foreign(img_size=(8, 88)).state_dict(), build())


def test_class_token_left_out_and_norm_behind_the_pooling():
    plain = foreign()
    model = load(plain.state_dict(), global_pool="avg")
    other = foreign(class_token=False, global_pool="avg", pos_embed="", fc_norm=True)
    state = dict(plain.state_dict())
    for name in ("weight", "bias"):
        state[f"fc_norm.{name}"] = state.pop(f"norm.{name}")
    other.load_state_dict({name: state[name] for name in other.state_dict()})
    assert_same(model(wide(16, 40)), other(wide(16, 40)))
    back = load(other.state_dict(), global_pool="avg", fc_norm=False)
    assert_same(back.norm.weight.detach(), plain.norm.weight.detach())


def test_another_patch_size():
    plain = foreign()
    model = load(plain.state_dict(), patch_size=4, img_size=(12, 8), **VIT)
    plain.set_input_size((12, 8), patch_size=4)
    assert_same(model(wide(12, 8)), plain(wide(12, 8)))


def test_patches_as_a_matrix():
    plain = foreign()
    state = plain.state_dict()
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].flatten(1)
    assert_same(load(state, **VIT)(wide(24, 16)), plain(wide(24, 16)))


def test_channels_and_classes_are_adapted_by_timm():
    plain = foreign()
    model = load(plain.state_dict(), in_chans=1, **VIT)
    grey = wide(24, 16, channels=1)
    # timm adds up in float32.
    assert_same(model(grey), plain(grey.expand(-1, 3, -1, -1)), atol=1e-5)
    model = load(plain.state_dict(), num_classes=9, **VIT)
    assert model(wide(24, 16)).shape == (2, 9)
    assert_same(model.forward_features(wide(24, 16)), plain.forward_features(wide(24, 16)))
    # timm's train.py gives -1 to get a new classifier, also for as many classes as the checkpoint has.
    model = load(plain.state_dict(), overlay={"num_classes": -1}, **VIT)
    assert not torch.equal(model.head.weight, plain.head.weight)
    assert_same(model.forward_features(wide(24, 16)), plain.forward_features(wide(24, 16)))
    features = load(plain.state_dict(), features_only=True, out_indices=(1,), fc_norm=False, **VIT)
    assert_same(features(wide(24, 16)), plain.forward_intermediates(wide(24, 16), [1], intermediates_only=True))


@pytest.mark.parametrize("layout", ["separate", "joint"])
def test_another_clip_distance(layout):
    options = {"rel_terms": "qkvb", "layout": layout}
    source = small(max_distance=(1, 2), **options).double().eval()
    model = load(source.state_dict(), max_distance=(4, 3), **options)
    for size in ((24, 16), (16, 72)):
        assert_same(model(wide(*size)), source(wide(*size)))
    # With a smaller clip distance, outputs are the same if no offset in the image is larger.
    source = small(max_distance=(4, 3), **options).double().eval()
    model = load(source.state_dict(), max_distance=(2, 1), **options)
    assert_same(model(wide(24, 16)), source(wide(24, 16)))
    assert (model(wide(16, 40)) - source(wide(16, 40))).abs().max() > 1e-4


@pytest.mark.parametrize(
    "change",
    [{"shared_heads": False}, {"layout": "joint"}, {"shared_heads": False, "layout": "joint", "max_distance": (3, 4)}],
)
def test_shared_to_heads_and_separate_to_joint_are_exact(change):
    source = small(max_distance=(2, 1), rel_terms="qkvb").double().eval()
    model = load(source.state_dict(), **{"max_distance": (2, 1), "rel_terms": "qkvb", **change})
    assert_same(model(wide(16, 40)), source(wide(16, 40)))


def test_terms_that_the_checkpoint_has_not_are_zero():
    source = small(rel_terms="k").double().eval()
    model = load(source.state_dict(), rel_terms="kvb")
    assert_same(model(wide(16, 40)), source(wide(16, 40)))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*position.key_rows"):
        load(source.state_dict(), rel_terms="v")
    broken = source.state_dict()
    del broken["blocks.1.attn.position.key_cols"]
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.1.attn.position.key_cols"):
        load(broken, rel_terms="k")


def test_prefix_biases_and_learned_rotations_that_the_checkpoint_has_not():
    options = {"class_token": True, "num_heads": 3}
    source = small(**options).double().eval()
    model = load(source.state_dict(), prefix_bias=True, **options)
    assert_same(model(wide(16, 40)), source(wide(16, 40)))
    rotating = load(source.state_dict(), rope="mixed", **options).state_dict()
    assert all(torch.equal(rotating[name], tensor) for name, tensor in source.state_dict().items())
    assert rotating["blocks.1.attn.rope.frequencies"].abs().max() > 0.1
    broken = model.state_dict()
    del broken["blocks.1.attn.prefix_bias.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.1.attn.prefix_bias.weight"):
        load(broken, prefix_bias=True, **options)


def test_slopes_take_any_plain_weights():
    plain = foreign()
    model = load(plain.state_dict(), position="slopes", **VIT)
    assert_same(model(wide(24, 16)), plain(wide(24, 16), attn_mask=bias_for(plain, wide(24, 16))), atol=1e-10)


def test_what_cannot_be_converted():
    piecewise = {"bucketing": "piecewise"}
    for source, target, message in (
        ({"shared_heads": False}, {}, r"key_rows in the checkpoint has one table per head, \(2, 15, 6\)"),
        ({"layout": "joint"}, {}, "key_table is a joint table, the model's is not"),
        (piecewise, {**piecewise, "max_distance": 3}, "clip distance 7, the model's is 3: with bucketing 'piecewise'"),
    ):
        with pytest.raises(ValueError, match=message):
            load(small(**source).double().state_dict(), **target)


def jax_names(plain):
    """Return the parameters of timm's model with the names and shapes of the original JAX archives."""
    heads, width = 2, 12
    state = {name: tensor.float().numpy() for name, tensor in plain.state_dict().items()}
    out = {
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "cls": state["cls_token"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
    }
    for number in range(3):
        here, there = f"blocks.{number}", f"Transformer/encoderblock_{number}"
        mixer = f"{there}/MultiHeadDotProductAttention_1"
        weights = np.split(state[f"{here}.attn.qkv.weight"], 3)
        biases = np.split(state[f"{here}.attn.qkv.bias"], 3)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            out[f"{mixer}/{name}/kernel"] = weight.T.reshape(width, heads, -1)
            out[f"{mixer}/{name}/bias"] = bias.reshape(heads, -1)
        out[f"{mixer}/out/kernel"] = state[f"{here}.attn.proj.weight"].T.reshape(heads, -1, width)
        out[f"{mixer}/out/bias"] = state[f"{here}.attn.proj.bias"]
        for ours, theirs in (("norm1", "LayerNorm_0"), ("norm2", "LayerNorm_2")):
            out[f"{there}/{theirs}/scale"] = state[f"{here}.{ours}.weight"]
            out[f"{there}/{theirs}/bias"] = state[f"{here}.{ours}.bias"]
        for ours, theirs in (("fc1", "Dense_0"), ("fc2", "Dense_1")):
            out[f"{there}/MlpBlock_3/{theirs}/kernel"] = state[f"{here}.mlp.{ours}.weight"].T
            out[f"{there}/MlpBlock_3/{theirs}/bias"] = state[f"{here}.mlp.{ours}.bias"]
    return out


def test_jax_archives(tmp_path):
    square = {"img_size": 24}
    plain = foreign(**square)
    np.savez(tmp_path / "vit.npz", **jax_names(plain))
    path = str(tmp_path / "vit.npz")
    model = small(**VIT, **square).eval()
    model.load_pretrained(path)
    assert_same(model.double()(wide(24, 16)), plain(wide(24, 16)), atol=1e-5)
    (tmp_path / "no.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"no.npz' is not an \.npz archive: timm.models.load_checkpoint reads"):
        model.load_pretrained(str(tmp_path / "no.npz"))
    with pytest.raises(FileNotFoundError, match=r"missing\.npz"):
        model.load_pretrained(str(tmp_path / "missing.npz"))
    for options, name in (({"reg_tokens": 2}, "reg_token"), ({"mlp_layer": GluMlp}, "blocks.0.mlp.fc2.weight")):
        other = small(**VIT, **square, **options)
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises(ValueError, match=rf"vit.npz' does not fit .*one of the two lacks '{name}'.*; build"):
            other.load_pretrained(path)
        assert_same([*other.state_dict().values()], [*before.values()], atol=0)
    # relvit's default is a model without absolute embedding and class token, whose norm comes after the pooling.
    model = timm.create_model("test_relvit", checkpoint_path=path, **{**SMALL, **square}).eval()
    expected = load(plain.state_dict(), overlay={"input_size": (3, 24, 24)}, **square)
    assert_same(model.double()(wide(24, 16)), expected(wide(24, 16)), atol=1e-5)
    # Attention-free models take only the values of attention.
    model = small("test_relvit_aft", kernel_size=3, **square)
    before = model.blocks[0].attn.qkv.weight.detach().clone()
    model.load_pretrained(path)
    weight = model.blocks[0].attn.qkv.weight.detach()
    assert_same(weight[-12:], plain.blocks[0].attn.qkv.weight.detach()[24:].float(), atol=0)
    assert_same(weight[:-12], before[:-12], atol=0)
    assert_same(model.head.bias.detach(), plain.head.bias.detach().float(), atol=0)
