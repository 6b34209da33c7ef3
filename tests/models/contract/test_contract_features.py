"""Features and outputs of all of timm's methods equal those of timm's model with ALiBi's slopes as a mask."""

import pytest
import timm
import torch
from vits import SMALL, assert_same, bias_for, images, small, twins

SIZE = (16, 40)


@pytest.mark.parametrize("prefix", [{}, {"class_token": True, "reg_tokens": 3}, {"reg_tokens": 2}], ids=str)
@pytest.mark.parametrize("fmt", ["NCHW", "NLC"])
def test_intermediates_in_every_form(prefix, fmt):
    model, plain = twins(fc_norm=False, **prefix)
    x = images(*SIZE, dtype=torch.float64)
    mask = bias_for(plain, x)
    for choice in (
        {},
        {"return_prefix_tokens": True},
        {"return_prefix_tokens": True, "output_dict": True},
        {"indices": [0, 2], "return_prefix_tokens": True, "intermediates_only": True, "norm": True},
        {"indices": [-2], "stop_early": True, "norm": True, "output_dict": True},
        {"indices": 2, "intermediates_only": True, "output_dict": True},
    ):
        got = model.forward_intermediates(x, output_fmt=fmt, **choice)
        assert_same(got, plain.forward_intermediates(x, attn_mask=mask, output_fmt=fmt, **choice))
    for choice in ({"n": 2}, {"n": [0, 2], "reshape": True, "norm": True}, {"n": 1, "return_prefix_tokens": True}):
        got = model.get_intermediate_layers(x, **choice)
        assert_same(got, plain.get_intermediate_layers(x, attn_mask=mask, **choice))
    unlike = plain.forward_intermediates(x, intermediates_only=True)[-1]
    assert (model.forward_intermediates(x, intermediates_only=True)[-1] - unlike).abs().max() > 1e-4


@pytest.mark.parametrize("pool", ["avg", "avgmax", "max", "token", "map", "prr", ""])
def test_features_head_and_pooling(pool):
    model, plain = twins(class_token=True, reg_tokens=1, global_pool=pool)
    x = images(*SIZE, dtype=torch.float64)
    features = plain.forward_features(x, attn_mask=bias_for(plain, x))
    assert_same(model.forward_features(x), features)
    assert_same(model.forward_head(features, pre_logits=True), plain.forward_head(features, pre_logits=True))
    assert_same(model.pool(features), plain.pool(features))
    assert_same(model(x), plain.forward_head(features))


@pytest.mark.parametrize("causal", [False, True])
def test_masks_join_the_relative_terms(causal):
    model, plain = twins(class_token=True)
    x = images(*SIZE, dtype=torch.float64)
    mask = torch.ones(11, 11, dtype=torch.bool).tril()
    alone = {"is_causal": True} if causal else {"attn_mask": mask}
    both = bias_for(plain, x).masked_fill(~mask, -torch.inf)
    assert_same(model(x, **alone), plain(x, attn_mask=both))
    assert_same(model.forward_intermediates(x, **alone), plain.forward_intermediates(x, attn_mask=both))


@pytest.mark.parametrize(
    ("indices", "prune_norm", "prune_head"), [(1, False, True), ([0, 1], True, False), ([-2], True, True)]
)
def test_pruning(indices, prune_norm, prune_head):
    model, plain = twins(class_token=True, fc_norm=False)
    x = images(*SIZE, dtype=torch.float64)
    before = model.forward_intermediates(x, indices, intermediates_only=True)
    kept = model.prune_intermediate_layers(indices, prune_norm=prune_norm, prune_head=prune_head)
    assert kept == plain.prune_intermediate_layers(indices, prune_norm=prune_norm, prune_head=prune_head)
    assert len(model.blocks) == max(kept) + 1
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_same(model.forward_intermediates(x, kept, intermediates_only=True), before)
    assert_same(model(x), plain(x, attn_mask=bias_for(plain, x)))


@pytest.mark.parametrize("name", ["relvit_small_patch4_32", "test_relvit_aft"])
def test_features_only_are_the_intermediates(name):
    model = small(name, features_only=True, out_indices=(0, 2)).eval()
    assert model.feature_info.channels() == [12, 12]
    assert model.feature_info.reduction() == [8, 8]
    assert model.feature_info.module_name() == ["blocks.0", "blocks.2"]
    x = images(*SIZE)
    whole = small(name).eval()
    whole.load_state_dict(model.model.state_dict(), strict=False)
    assert_same(model(x), whole.forward_intermediates(x, [0, 2], intermediates_only=True), atol=0)
    by_default = timm.create_model(name, features_only=True, **SMALL)
    assert by_default.feature_info.out_indices == (0, 1, 2)


@pytest.mark.parametrize("way", ["fx", "hook"])
def test_features_by_graph_and_by_hooks(way):
    model = small(features_only=True, feature_cls=way, out_indices=(0, 2), class_token=True).eval()
    whole = small(class_token=True).eval()
    whole.load_state_dict((model.graph_module if way == "fx" else model.body).state_dict(), strict=False)
    x = images()
    both = whole.forward_intermediates(x, [0, 2], output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True)
    assert_same(model(x), [torch.cat((prefix, patches), dim=1) for patches, prefix in both], atol=0)


def test_intermediates_need_all_patches_for_an_image_of_them():
    model = small(patch_drop_rate=0.5).train()
    with pytest.raises(ValueError, match="output_fmt 'NCHW' needs all patches"):
        model.forward_intermediates(images())
    assert model.forward_intermediates(images(), output_fmt="NLC")[1][0].shape == (2, 3, 12)
    with pytest.raises(ValueError, match="output_fmt is 'NHWC'; allowed are 'NCHW', 'NLC'"):
        model.forward_intermediates(images(), output_fmt="NHWC")
