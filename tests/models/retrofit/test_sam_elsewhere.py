"""SAM's encoders of transformers and segment_anything: the source's numbers at its size, at others by the rule."""

import copy
import sys
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from comparisons import assert_equal, assert_hooks_see_the_same, tensors_of
from processes import Ranks, as_torchrun
from retrofit_cases import fingerprint, images
from sam_cases import ELSEWHERE, ddp_steps, sam_blocks, sam_encoder, sam_model, sgd_batches, sgd_steps
from torch import nn

import relvit
from relvit.models import set_reach

TRAINED = (56, 56)
# Rows and columns of patches: a canvas as large, smaller and larger ones, cut in both directions.
GRIDS = [(5, 7), (7, 3), (4, 6), (8, 9), (9, 4)]


def retrofitted(source):
    return relvit.retrofit(copy.deepcopy(source))


def outputs(encoder, x):
    """All tensors that an encoder returns, those of layers included, by name."""
    if not hasattr(encoder, "config"):
        return {"features": encoder(x)}
    return tensors_of(encoder(x, output_hidden_states=True))


def of_size(source, rows, columns):
    """The source for another grid: tables longer or shorter at their edges, the canvas's embedding cut to the grid."""
    model = copy.deepcopy(source)
    canvas = (max(rows, columns),) * 2
    if canvas != (7, 7):
        resized = F.interpolate(model.pos_embed.permute(0, 3, 1, 2), canvas, mode="bicubic", antialias=True)
        model.pos_embed = nn.Parameter(resized.permute(0, 2, 3, 1))
    model.pos_embed = nn.Parameter(model.pos_embed[:, :rows, :columns])
    for block in sam_blocks(model):
        if block.window_size == 0:
            for name, size in (("rel_pos_h", rows), ("rel_pos_w", columns)):
                offsets = torch.arange(1 - size, size).clamp(-6, 6) + 6
                setattr(block.attn, name, nn.Parameter(getattr(block.attn, name)[offsets]))
    if hasattr(model.patch_embed, "image_size"):
        model.patch_embed.image_size = (8 * rows, 8 * columns)
    return model


@pytest.mark.parametrize("case", ELSEWHERE)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-2)],
)
def test_at_its_size_it_computes_what_it_did(case, dtype, tolerance):
    if case.endswith("eager") and dtype == torch.float64:
        tolerance = 1e-6  # Its softmax is in single precision.
    source = sam_encoder(case)
    model, x = retrofitted(source).to(dtype), images(*TRAINED).to(dtype)
    # In half precision both are compared with what they approximate.
    reference = source if dtype in (torch.bfloat16, torch.float16) else source.to(dtype)
    assert_equal(outputs(model, x), outputs(reference, x.to(reference.pos_embed.dtype)), tolerance)


@pytest.mark.parametrize("case", ["sam", "sam_hq", "segment_anything"])
def test_at_other_sizes_tables_have_their_edge_and_the_embedding_is_that_of_the_canvas(case):
    source = sam_encoder(case)
    model = retrofitted(source)
    for grid in GRIDS:
        x = images(*(8 * side for side in grid))
        assert_equal(outputs(model, x), outputs(of_size(source, *grid), x), 1e-10)


# segment_anything has no gradient checkpointing.
@pytest.mark.parametrize(
    ("case", "checkpointing"),
    [*product(["sam", "sam eager", "sam_hq"], [False, True]), ("segment_anything", False)],
)
def test_gradients_are_the_sources(case, checkpointing):
    source = sam_encoder(case)
    model, x, grads = retrofitted(source), images(*TRAINED), []
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for net in (source, model):
        net.train()
        sum(part.square().sum() for part in outputs(net, x).values()).backward()
        grads.append({name: parameter.grad for name, parameter in net.named_parameters()})
    assert_equal(grads[1], grads[0], 1e-6 if case.endswith("eager") else 1e-10)


@pytest.mark.slow
def test_two_processes_train_as_the_source_does_in_one(tmp_path):
    source = sam_encoder("sam").train()
    ranks = Ranks([tmp_path], tmp_path, as_torchrun(), ddp_steps)
    expected = sgd_steps(source, sgd_batches())
    assert ranks.finish(120) == [0, 0], ranks.text()
    for rank in range(2):
        assert_equal(torch.load(tmp_path / f"{rank}.pt"), expected, 1e-10)


@pytest.mark.parametrize("case", ELSEWHERE)
def test_half_before_and_after_the_retrofit_is_the_same(case):
    source, x = sam_encoder(case), images(*TRAINED).half()
    before, after = retrofitted(source.float().half()), retrofitted(source.float()).half()
    assert {parameter.dtype for parameter in after.parameters()} == {torch.float16}
    assert_equal(outputs(before, x), outputs(after, x), 0.0)


@pytest.mark.parametrize("case", ELSEWHERE)
def test_state_dicts_are_the_sources(case):
    source, other = sam_encoder(case), sam_encoder(case)
    model = retrofitted(source)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    model.load_state_dict(other.state_dict())
    x = images(*TRAINED)
    assert_equal(outputs(model, x), outputs(other, x), 1e-6 if case.endswith("eager") else 1e-10)
    source.load_state_dict(model.state_dict())
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in other.state_dict().items())
    assert {"pos_embed"} < model.no_weight_decay() < set(model.state_dict())


def test_a_model_cut_to_another_size_after_it_was_built():
    """As cellpose cuts `segment_anything`'s: the source interpolates tables of another length, and keeps doing so."""
    source = sam_encoder("segment_anything", img_size=64)
    source.pos_embed = nn.Parameter(source.pos_embed[:, ::2, ::2])
    for block in source.blocks:
        block.window_size = 0
    model, x = retrofitted(source), images(32, 32)
    assert model.patch_embed.img_size == (32, 32)
    assert_equal(outputs(model, x), outputs(source, x), 1e-10)
    assert model(images(40, 24)).shape == (2, 16, 5, 3)


def test_the_mask_decoder_gets_the_same():
    source = sam_model()
    model = copy.deepcopy(source)
    relvit.retrofit(model.vision_encoder)
    points = torch.tensor([[[[10.0, 20.0]]]], dtype=torch.float64)
    given = {"pixel_values": images(*TRAINED, batch=1), "input_points": points}
    ours, theirs = (net(**given, output_attentions=True) for net in (model, source))
    for name in ("iou_scores", "pred_masks"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-10)
    torch.testing.assert_close(ours.mask_decoder_attentions, theirs.mask_decoder_attentions, rtol=0, atol=1e-10)
    assert ours.vision_attentions == theirs.vision_attentions == ()


def test_attention_weights_are_refused_where_the_source_formed_them():
    model, x = retrofitted(sam_encoder("sam eager")), images(*TRAINED)
    with pytest.raises(ValueError, match=r"output_attentions: after relvit\.retrofit no attention weights are formed"):
        model(x, output_attentions=True)


@pytest.mark.parametrize("case", ["sam", "sam_hq", "segment_anything"])
def test_hooks_stay_and_see_the_same(case):
    ends = ("attn", "attn.qkv", "mlp", "neck")
    assert_hooks_see_the_same(sam_encoder(case), ends, retrofitted, images(*TRAINED))


@pytest.mark.parametrize("case", ["sam", "segment_anything"])
def test_plans_and_reaches(case):
    model = retrofitted(sam_encoder(case))
    x, larger = images(*TRAINED), images(64, 72)
    plans = relvit.explain(model)
    assert [(plan.position, plan.terms, plan.parameters) for plan in plans[:2]] == [
        ("SamTables", "k", 2 * 5 * 12),
        ("SamTables", "k", 2 * 13 * 12),
    ]
    expected, other = outputs(model, x), next(iter(outputs(model, larger).values()))
    set_reach(model, "stretch")
    assert_equal(outputs(model, x), expected, 1e-10)
    assert (next(iter(outputs(model, larger).values())) - other).abs().max() > 1e-4
    set_reach(model, "windows")
    assert_equal(outputs(model, x), expected, 1e-10)
    assert torch.isfinite(next(iter(outputs(model, larger).values()))).all()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sam", "segment_anything"])
def test_compiled_and_exported(case):
    source = sam_encoder(case, **({"depth": 2} if case == "segment_anything" else {"num_hidden_layers": 2})).float()
    model = retrofitted(source)
    torch.compiler.reset()
    compiled = torch.compile(model, dynamic=False)
    for grid in ((7, 7), (5, 7)):
        x = images(*(8 * side for side in grid)).float()
        name, expected = next(iter(outputs(of_size(source, *grid), x).items()))
        nets = [torch.export.export(model, (x,)).module()] + ([compiled] if grid == (7, 7) else [])
        for net in nets:
            features = net(x) if case == "segment_anything" else net(x)[0]
            assert_equal({name: features}, {name: expected}, 1e-5)


REFUSED = {
    "overlapping patches": (
        lambda model: setattr(model.patch_embed.proj, "stride", (4, 4)),
        r"patch_embed\.proj has stride \(4, 4\) and padding \(0, 0\) with patches of \(8, 8\)",
    ),
    "no positions": (
        lambda model: setattr(model.blocks[2].attn, "use_rel_pos", False),
        r"blocks\.2\.attn has no relative positions",
    ),
    "another attention": (
        lambda model: setattr(model.blocks[2], "attn", nn.Identity()),
        r"blocks\.2\.attn is a Identity, which cannot be retrofitted; allowed: 'Attention'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_over_is_refused_first(name):
    spoil, message = REFUSED[name]
    model = sam_encoder("segment_anything")
    spoil(model)
    before = fingerprint(model)
    with pytest.raises(ValueError, match=message):
        relvit.retrofit(model)
    assert fingerprint(model) == before


def test_whole_models_are_told_to_retrofit_their_encoder():
    with pytest.raises(ValueError, match=r"it wraps vision_encoder, a SamVisionEncoder: .* model\.vision_encoder"):
        relvit.retrofit(sam_model())
    with pytest.raises(
        ValueError, match=r"image height 41 is not a multiple of the patch size 8: use 40 or 48 .as SAM does"
    ):
        retrofitted(sam_encoder("segment_anything"))(images(41, 56))


def test_versions_that_are_not_known(monkeypatch):
    encoder = sam_encoder("sam")
    monkeypatch.setattr(sys.modules["relvit.models.retrofit.sources"], "version", lambda library: "4.57.6")
    with pytest.raises(
        ValueError, match=r"SamVisionEncoder is of transformers 4.57.6; retrofit knows transformers>=5.4"
    ):
        relvit.retrofit(encoder)
