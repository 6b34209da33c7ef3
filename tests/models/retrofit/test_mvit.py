"""MViTv2 of timm: the formula pair by pair on any shape; plans, reaches, features and weights for another size."""

import copy

import numpy as np
import pytest
import timm.models.mvitv2 as source
import torch
from comparisons import assert_equal
from own_positions import MVITS, imported, mvit, outputs
from retrofit_cases import images
from timm.models import create_feature_extractor
from timm.models._features import FeatureGetterNet

import relvit
from relvit.models import set_reach
from relvit.models.weights.transfer import Weights, transfer_weights

TRAINED = (64, 64)
# The sizes are wide, high, smaller and larger; some sides are multiples of the patch.
SIZES = [TRAINED, (32, 96), (128, 64), (56, 72), (37, 90)]


def pair_by_pair(model, monkeypatch, stretched=False):
    """Let the source look up a vector for each pair of tokens, by offsets of the size that its tables are for."""
    built = {}

    def record(attn, q, has_cls_token, q_size, k_size, rel_pos_h, rel_pos_w):
        built[id(rel_pos_h)] = (tuple(q_size), tuple(k_size))
        return attn

    def look_up(table, queries, keys, built_queries, built_keys):
        query_step, key_step = max(built_keys / built_queries, 1), max(built_queries / built_keys, 1)
        zero, last, places = (built_keys - 1) * key_step, len(table) - 1, []
        ratio = max(built_queries, built_keys) / max(queries, keys) if stretched else 1
        for i in range(queries):
            for j in range(keys):
                # Round in float32 as the source does, so that sums of fractions become the same whole numbers.
                offset = np.float32(i) * np.float32(query_step) - np.float32(j) * np.float32(key_step)
                places.append(min(max(float(offset * np.float32(ratio) + np.float32(zero)), 0), last))
        low = torch.tensor(places).long()
        part = (torch.tensor(places, dtype=torch.float64) - low if stretched else torch.zeros(len(low)))[:, None]
        rows = table[low] * (1 - part) + table[(low + 1).clamp(max=last)] * part
        return rows.unflatten(0, (queries, keys))

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


@pytest.mark.parametrize("case", MVITS)
def test_on_other_shapes_it_computes_each_pair_with_the_steps_of_the_training(case, monkeypatch):
    original = mvit(case)
    model = imported(original)
    pair_by_pair(original, monkeypatch)
    for size in SIZES if case == "class token" else SIZES[2:]:
        x = images(*size)
        assert_equal(outputs(model, x), outputs(original, x), 1e-10)


def test_plans_and_the_sizes_of_the_training():
    model = imported(mvit("class token"))
    plans = relvit.explain(model)
    assert [(plan.layer, plan.position, plan.terms, plan.backend) for plan in plans] == [
        (f"stages.{stage}.blocks.{block}.attn", "PooledOffsets", "k", "tiled")
        for stage, block in ((0, 0), (1, 0), (1, 1), (2, 0))
    ]
    # The keys are 4 x 4, 8 x 8, 4 x 4 and 8 x 8 patches; tables have 16 x 16 to 8 x 8 offsets.
    assert [plan.width for plan in plans] == [(6, 14), (6, 22), (6, 14), (6, 22)]
    assert [plan.parameters for plan in plans] == [12 * 31, 12 * 15, 12 * 15, 12 * 15]
    assert [plan.width[1] for plan in relvit.explain(model, (128, 64))] == [18, 30, 18, 30]
    embed = model.patch_embed
    assert (embed.img_size, embed.grid_size, embed.patch_size) == ((64, 64), (16, 16), (4, 4))
    with pytest.raises(ValueError, match=r"images must be \(B, 3, height, width\), got \(3, 64, 64\)"):
        model(images(*TRAINED)[0])


# The second model has tables for 16 x 16 patches, but 15 x 15 patches at every image size that gives these tables.
@pytest.mark.parametrize(("kernel", "padding", "side"), [(7, 2, 66), (12, 2, 65)])
def test_numbers_stay_at_the_size_that_the_model_was_built_for(kernel, padding, side):
    original = mvit("patches", (side, side), patch_kernel=(kernel, kernel), patch_padding=(padding, padding))
    assert_equal(outputs(imported(original), images(side, side)), outputs(original, images(side, side)), 1e-10)


def test_reaches(monkeypatch):
    original = mvit("patches")
    model, x, larger = imported(original), images(*TRAINED), images(96, 128)
    expected, other = outputs(model, x), outputs(model, larger)
    set_reach(model, "stretch")
    assert_equal(outputs(model, x), expected, 1e-10)
    assert_equal(outputs(model, larger), outputs(pair_by_pair(original, monkeypatch, stretched=True), larger), 1e-6)
    set_reach(model, "trained")
    assert_equal(outputs(model, larger), other, 0)
    for reach in ("logn", "stretch-logn", "windows", "bands"):
        with pytest.raises(
            ValueError, match=f"{reach}' is not for .*: its MultiScaleRelative pools .* 'trained' or 'stretch'"
        ):
            set_reach(model, reach)


def test_offsets_are_exact_in_half_precision():
    model, x = imported(mvit("patches")), images(104, 72)
    set_reach(model, "stretch")
    # Lightning's precision 'bf16-true' changes the default dtype in the forward pass.
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = outputs(model, x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(found, outputs(model, x), 1e-10)


def test_features_of_timm():
    model, x, node = imported(mvit("class token")), images(64, 96), "stages.1.blocks.0.attn"
    getter = FeatureGetterNet(copy.deepcopy(model), out_indices=[0, 2])
    assert [tuple(part.shape[1:]) for part in getter(x)] == [(6, 16, 24), (24, 4, 6)]
    seen = []
    model.get_submodule(node).register_forward_hook(lambda _module, _args, output: seen.append(output[0]))
    model(x)
    assert_equal({"": create_feature_extractor(model, [node])(x)[node][0]}, {"": seen[0]}, 1e-10)


def test_weights_of_another_size_are_interpolated_as_timm_loads_them():
    original, larger = mvit("patches"), mvit("patches", img_size=(96, 96))
    state = source.checkpoint_filter_fn(original.state_dict(), larger)
    larger.load_state_dict(state)
    model = imported(mvit("patches", img_size=(96, 96)))
    model.pretrained_cfg = {}
    report = transfer_weights(model, Weights("there", original.state_dict(), input_size=(3, *TRAINED)))
    assert (report.new, report.skipped) == ([], [])
    x = images(96, 96)
    assert_equal(outputs(model, x), outputs(larger, x), 1e-10)
