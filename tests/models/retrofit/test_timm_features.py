"""Functions of timm work with retrofitted models: features, checkpointing, optimiser groups, tracing."""

import copy
import pickle

import pytest
import torch
from retrofit_cases import EACH, NAFLEX, OWN, VITS, build, images, naflex_batch, retrofitted, tables
from timm.models import create_feature_extractor
from timm.models._features import FeatureGetterNet
from timm_versions import since
from torch import nn
from vits import groups_of

from relvit.models.param_groups import param_groups


@pytest.mark.parametrize("case", EACH)
def test_every_table_gets_the_same_gradient_with_checkpointing(case):
    model = retrofitted(build(case), "qkvb", trained=False, max_distance=1).train()
    x, count, runs = images(16, 40), [], []
    model.blocks[0].attn.proj.register_forward_hook(lambda *_: count.append(1))
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        # Use the features of all tokens: the class token has no position, so its features do not depend on the last
        # block's tables.
        features = model.forward_features(x)
        runs.append((features, *torch.autograd.grad(features.square().sum(), list(tables(model).values()))))
    # The block runs once without checkpointing, and twice with it.
    assert len(count) == 3
    assert len(runs[0]) == 1 + 2 * 2 * 4
    for plain, again in zip(*runs, strict=True):
        assert plain.abs().sum() > 0
        torch.testing.assert_close(again, plain, rtol=0, atol=1e-10)


def test_reentrant_checkpointing_gives_the_same_gradients(monkeypatch):
    monkeypatch.setattr("timm.layers.config._USE_REENTRANT_CKPT", True)
    runs = []
    for checkpointing in (False, True):
        model = retrofitted(build("dinov2"), "qkvb", max_distance=1).train()
        model.set_grad_checkpointing(checkpointing)
        model.forward_features(images(16, 40)).square().sum().backward()
        runs.append([table.grad for table in tables(model).values()])
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", EACH)
def test_intermediates_are_the_features(case):
    model = retrofitted(build(case))
    x = images(16, 40)
    features, prefix = model.forward_features(x), model.num_prefix_tokens
    final, (first, last) = model.forward_intermediates(x, norm=True, return_prefix_tokens=prefix > 0)
    torch.testing.assert_close(final, features, rtol=0, atol=0)
    patches = last[0] if prefix else last
    assert patches.shape == (2, 24, 2, 5)
    torch.testing.assert_close(patches.flatten(2).transpose(1, 2), features[:, prefix:], rtol=0, atol=0)
    if prefix:
        torch.testing.assert_close(last[1], features[:, :prefix], rtol=0, atol=0)
        first = first[0]
    if case in VITS:
        torch.testing.assert_close(model.get_intermediate_layers(x, norm=True)[0], features[:, prefix:])
    getter = FeatureGetterNet(copy.deepcopy(model), out_indices=[0], norm=True)
    torch.testing.assert_close(getter(x)[0], first, rtol=0, atol=0)
    if case in NAFLEX:
        since("1.0.31")
    assert model.prune_intermediate_layers([0]) == [0]
    torch.testing.assert_close(model.forward_intermediates(x, norm=True)[1][0], first, rtol=0, atol=0)


def test_intermediates_of_a_padded_batch():
    since("1.0.28")
    original = build("naflex", embed_proj_type="linear")
    options = {"output_fmt": "NLC", "output_dict": True}
    want = original.forward_intermediates(naflex_batch(), **options)
    got = retrofitted(original, trained=False).forward_intermediates(naflex_batch(), **options)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", EACH)
def test_masks_heads_and_input_sizes_are_timms(case):
    if case == "rope mixed":
        # At other sizes, older versions of timm multiply single by double precision, which fails.
        since("1.0.31")
    original = build(case)
    model = retrofitted(original, trained=False)
    x, count = images(), original.num_prefix_tokens + 6
    ways = [{"attn_mask": torch.randn(1, 1, count, count, dtype=torch.float64)}]
    if case not in NAFLEX:
        ways.append({"is_causal": True})
    for way in ways:
        want = original.forward_features(x, **way)
        torch.testing.assert_close(model.forward_features(x, **way), want, rtol=0, atol=1e-12)
    for net in (model, original):
        torch.manual_seed(0)
        net.reset_classifier(7)
        net.double()
        if case not in NAFLEX:
            net.set_input_size((16, 40))
    x = images() if case in NAFLEX else images(16, 40)
    torch.testing.assert_close(model(x), original(x), rtol=0, atol=1e-12)
    assert model(images()).shape == (2, 7)


@pytest.mark.parametrize("case", EACH)
def test_weights_go_back_and_forth_and_tables_have_the_rate_of_their_block_without_decay(case):
    original = build(case)
    model = retrofitted(original)
    groups, x = groups_of(model), images(8, 40)
    rates = [groups[f"blocks.{index}.attn.proj.weight"][0] for index in range(2)]
    assert rates[0] < rates[1]
    assert {groups[name] == (rates[int(name.split(".")[1])], 0.0) for name in tables(model)} == {True}
    state = model.state_dict()
    assert {key for key in state if ".position." not in key} == set(original.state_dict())
    assert "blocks.1.attn.position.value_cols" in state
    fresh = retrofitted(build(case), trained=False)
    for parameter in fresh.parameters():
        torch.nn.init.zeros_(parameter)
    fresh.load_state_dict(state)
    for copied in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(copied(x), model(x), rtol=0, atol=0)
    missing, unexpected = model.load_state_dict(original.state_dict(), strict=False)
    assert set(missing) == set(tables(model))
    assert not unexpected


def test_tables_in_a_wrapper_have_their_rate_without_decay():
    backbone = retrofitted(build("dinov2"))
    model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(24, 2)})
    own = {id(table) for table in tables(backbone).values()} | {id(backbone.pos_embed)}
    groups = param_groups(model, lr=0.1, weight_decay=0.3)
    assert own <= {id(part) for group in groups if group["weight_decay"] == 0 for part in group["params"]}
    decayed = {id(part) for group in groups if group["weight_decay"] == 0.3 for part in group["params"]}
    assert {id(model["head"].weight), id(backbone.blocks[0].attn.proj.weight)} <= decayed
    assert [len(group["params"]) for group in groups if group["lr"] == 1] == [len(tables(backbone))]


# 'deit distilled' is not among these cases, because timm's own distilled model cannot be traced with dynamic sizes.
@pytest.mark.parametrize("case", ["dinov2", "siglip", "eva post-norm", "eva02", "rope mixed", "srelpos", "sam"])
def test_symbolic_tracing_for_feature_extraction(case):
    if case == "eva02":
        since("1.0.31")
    own = case in OWN
    model = (retrofitted(build(case), *([] if own else ["qkvb"]))).float()
    x, node = images(*(OWN[case][1]["img_size"] if own else (24, 16))).float(), "neck" if case == "sam" else "norm"
    traced = create_feature_extractor(model, [node])
    torch.testing.assert_close(traced(x)[node], model.forward_features(x), rtol=0, atol=1e-6)
