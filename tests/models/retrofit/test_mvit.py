"""MViTv2 of timm: the source's numbers at its size; at others, and on any shape, the formula pair by pair."""

import copy

import numpy as np
import pytest
import timm.models.mvitv2 as source
import torch
from comparisons import assert_equal, assert_hooks_see_the_same
from retrofit_cases import fingerprint, images
from timm.models import create_feature_extractor
from timm.models._features import FeatureGetterNet
from torch import nn

import relvit
from relvit.models import set_reach
from relvit.models.weights.transfer import Weights, transfer_weights

TRAINED = (64, 64)
SMALL = {"depths": (1, 2, 1), "embed_dim": (6, 12, 24), "num_heads": (1, 2, 4)}
CASES = {
    "patches": {},
    "class token": {"use_cls_token": True},
    "expanded late": {"expand_attn": False, "residual_pooling": False, "use_cls_token": True},
    "max": {"mode": "max"},
    "strides that do not divide": {"stride_kv": ((3, 3), (1, 1), (1, 1))},
}
# Wide, high, smaller and larger ones; sides that are multiples of the patch, and others.
SIZES = [(32, 96), (128, 64), (56, 72), (37, 90)]


def build(case, **changes):
    """A source in double precision with large weights."""
    torch.manual_seed(0)
    size = changes.pop("img_size", TRAINED)
    model = source.MultiScaleVit(source.MultiScaleVitCfg(**{**SMALL, **CASES[case], **changes}), size, num_classes=5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def retrofitted(model):
    return relvit.retrofit(copy.deepcopy(model))


def outputs(model, x):
    """Classes, and the features of all stages, by name."""
    last, stages = model.forward_intermediates(x, norm=True)
    return {"classes": model(x), "last": last} | {f"stage {index}": part for index, part in enumerate(stages)}


def pair_by_pair(model, monkeypatch, stretched=False):
    """The source with a vector for each pair of tokens, offsets as at the size for which the tables were built."""
    built = {}

    def record(attn, q, has_cls_token, q_size, k_size, rel_pos_h, rel_pos_w):
        built[id(rel_pos_h)] = (tuple(q_size), tuple(k_size))
        return attn

    def look_up(table, queries, keys, built_queries, built_keys):
        query_step, key_step = max(built_keys / built_queries, 1), max(built_queries / built_keys, 1)
        zero, last, rows = (built_keys - 1) * key_step, len(table) - 1, []
        ratio = max(built_queries, built_keys) / max(queries, keys) if stretched else 1
        for i in range(queries):
            for j in range(keys):
                # Sums of fractions have the rounding of the source where they are whole numbers.
                offset = np.float32(i) * np.float32(query_step) - np.float32(j) * np.float32(key_step)
                place = min(max(float(offset * np.float32(ratio) + np.float32(zero)), 0), last)
                low, part = int(place), place - int(place) if stretched else 0
                rows.append(table[low] * (1 - part) + table[min(low + 1, last)] * part)
        return torch.stack(rows).unflatten(0, (queries, keys))

    def add(attn, q, has_cls_token, q_size, k_size, rel_pos_h, rel_pos_w):
        sizes = zip(q_size, k_size, *built[id(rel_pos_h)], strict=True)
        of_rows, of_cols = (look_up(t, *size) for t, size in zip((rel_pos_h, rel_pos_w), sizes, strict=True))
        first = int(has_cls_token)
        pairs = (of_rows[:, None, :, None] + of_cols[None, :, None, :]).flatten(2, 3).flatten(0, 1)
        added = torch.zeros_like(attn)
        added[:, :, first:, first:] = torch.einsum("bhid,ijd->bhij", q[:, :, first:], pairs)
        return attn + added

    monkeypatch.setattr(source, "cal_rel_pos_type", record)
    model(images(*TRAINED))
    monkeypatch.setattr(source, "cal_rel_pos_type", add)
    return model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_at_its_size_it_computes_what_it_did(case, dtype, tolerance):
    original = build(case)
    if dtype == torch.bfloat16:
        # Rounding of large random weights would add up from layer to layer.
        for name, parameter in original.named_parameters():
            parameter.data *= 1 if "rel_pos" in name or parameter.dim() == 1 else 0.3
    model, x = retrofitted(original).to(dtype), images(*TRAINED)
    # In half precision it is compared with what it approximates.
    exact = torch.float64 if dtype == torch.bfloat16 else dtype
    assert_equal(outputs(model, x.to(dtype)), outputs(original.to(exact), x.to(exact)), tolerance)


@pytest.mark.parametrize("case", CASES)
def test_on_other_shapes_it_computes_each_pair_with_the_steps_of_the_training(case, monkeypatch):
    original = build(case)
    model = retrofitted(original)
    pair_by_pair(original, monkeypatch)
    for size in [TRAINED, *SIZES]:
        x = images(*size)
        assert_equal(outputs(model, x), outputs(original, x), 1e-10)


@pytest.mark.parametrize("case", ["patches", "class token", "max"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_the_sources(case, checkpointing):
    original = build(case)
    model, x, grads = retrofitted(original), images(*TRAINED), []
    model.set_grad_checkpointing(checkpointing)
    for net in (original, model):
        net.train()
        # Bits of all outputs.
        sum((part * part.detach().sign()).mean() for part in outputs(net, x).values()).backward()
        grads.append({name: parameter.grad for name, parameter in net.named_parameters()})
    # The norms of keys add a number to all logits of a query, which changes no weight.
    idle = [name for name in grads[0] if name.endswith("norm_k.bias")]
    for name in idle:
        assert max(part.pop(name).abs().max() for part in grads) < 1e-14
    assert_equal(grads[1], grads[0], 1e-10)


@pytest.mark.parametrize("case", ["patches", "expanded late"])
def test_parameters_are_the_sources_and_restore_gives_the_source_back(case):
    original, other = build(case), build(case)
    model, x = retrofitted(original), images(*TRAINED)
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.5)
    model.load_state_dict(other.state_dict())
    assert_equal(outputs(model, x), outputs(other, x), 1e-10)
    assert model.no_weight_decay() == original.no_weight_decay()
    assert relvit.restore(model) is model
    assert fingerprint(model) == fingerprint(original)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in other.state_dict().items())
    assert torch.equal(model(x), other(x))
    relvit.restore(relvit.retrofit(model))
    assert fingerprint(model) == fingerprint(original)


def test_plans_and_the_sizes_of_the_training():
    model = retrofitted(build("class token"))
    plans = relvit.explain(model)
    assert [(plan.layer, plan.position, plan.terms, plan.backend) for plan in plans] == [
        (f"stages.{stage}.blocks.{block}.attn", "PooledOffsets", "k", "tiled")
        for stage, block in ((0, 0), (1, 0), (1, 1), (2, 0))
    ]
    # Keys of 4 x 4, 8 x 8, 4 x 4 and 8 x 8 patches; tables of 16 x 16 to 8 x 8 offsets.
    assert [plan.width for plan in plans] == [(6, 14), (6, 22), (6, 14), (6, 22)]
    assert [plan.parameters for plan in plans] == [12 * 31, 12 * 15, 12 * 15, 12 * 15]
    assert [plan.width[1] for plan in relvit.explain(model, (128, 64))] == [18, 30, 18, 30]
    embed = model.patch_embed
    assert (embed.img_size, embed.grid_size, embed.patch_size) == ((64, 64), (16, 16), (4, 4))
    with pytest.raises(ValueError, match=r"images must be \(B, 3, height, width\), got \(3, 64, 64\)"):
        model(images(*TRAINED)[0])


def test_reaches(monkeypatch):
    original = build("patches")
    model, x, larger = retrofitted(original), images(*TRAINED), images(96, 128)
    expected, other = outputs(model, x), outputs(model, larger)
    set_reach(model, "stretch")
    assert_equal(outputs(model, x), expected, 1e-10)
    assert_equal(outputs(model, larger), outputs(pair_by_pair(original, monkeypatch, stretched=True), larger), 1e-6)
    set_reach(model, "trained")
    assert_equal(outputs(model, larger), other, 0)
    for reach in ("logn", "stretch-logn", "windows", "bands"):
        with pytest.raises(ValueError, match=f"{reach}' is not for RetrofittedMultiScaleVit: its layers pool tokens"):
            set_reach(model, reach)


def test_hooks_and_features_of_timm():
    x, ends = images(*TRAINED), ("attn", "pool_q", "norm_k", "proj")
    model, expected = assert_hooks_see_the_same(build("class token"), ends, retrofitted, x)
    getter = FeatureGetterNet(copy.deepcopy(model), out_indices=[0, 2])
    assert [tuple(part.shape[1:]) for part in getter(images(64, 96))] == [(6, 16, 24), (24, 4, 6)]
    traced = create_feature_extractor(model, ["stages.1.blocks.0.attn"])
    assert_equal({"": traced(x)["stages.1.blocks.0.attn"][0]}, {"": expected["stages.1.blocks.0.attn"][0]}, 1e-10)


def test_weights_of_another_size_are_interpolated_as_timm_loads_them():
    original, larger = build("patches"), build("patches", img_size=(96, 96))
    state = source.checkpoint_filter_fn(original.state_dict(), larger)
    larger.load_state_dict(state)
    model = retrofitted(build("patches", img_size=(96, 96)))
    model.pretrained_cfg = {}
    report = transfer_weights(model, Weights("there", original.state_dict(), input_size=(3, *TRAINED)))
    assert (report.new, report.skipped) == ([], [])
    x = images(96, 96)
    assert_equal(outputs(model, x), outputs(larger, x), 1e-10)


def test_exported():
    original = build("class token").float()
    model, x = retrofitted(original), images(*TRAINED).float()
    exported = torch.export.export(model, (x,)).module()
    assert_equal({"": exported(x)}, {"": original(x)}, 1e-5)


@pytest.mark.slow
def test_compiled():
    original = build("patches", depths=(1,), embed_dim=(6,), num_heads=(1,), img_size=(32, 32)).float()
    model, x, grads = retrofitted(original), images(32, 32).float(), []
    torch.compiler.reset()
    for net, called in ((original, original), (model, torch.compile(model, dynamic=False))):
        out = called(x)
        out.square().mean().backward()
        found = {name: part.grad for name, part in net.named_parameters() if not name.endswith("norm_k.bias")}
        grads.append({"": out.detach(), **found})
    assert_equal(grads[1], grads[0], 1e-4)


REFUSED = {
    "pool first": (
        {"pool_first": True},
        r"0\.attn is a MultiScaleAttentionPoolFirst, .* allowed: 'MultiScaleAtt",
    ),
    "absolute": ({"use_abs_pos": True}, "pos_embed: MViTv2 with an absolute embedding, .* use_abs_pos=False"),
    "none": ({"rel_pos_type": ""}, r"stages\.0\.blocks\.0\.attn has no relative positions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_over_is_refused_first(name):
    changes, message = REFUSED[name]
    model = build("patches", **changes)
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        relvit.retrofit(model)
    assert fingerprint(model) == before
