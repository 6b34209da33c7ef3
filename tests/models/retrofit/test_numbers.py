"""Outputs of retrofitted timm models equal those of the originals, of images without padding, and of masked patches."""

import copy
import math
from functools import partial

import pytest
import timm
import torch
from retrofit_cases import CASES, EACH, EVAS, NAFLEX, VITS, build, images, naflex_batch, retrofitted, tables
from timm.layers import BatchNormAct2d, HybridEmbed, PatchDropout
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer
from timm_versions import since
from torch import nn

import relvit
from relvit.models.retrofit.timm_attention import GridArgument

SIZES = [(24, 16), (8, 40), (32, 32)]
OTHERS = {"max_distance": (1, 2), "rel_terms": "qkvb", "shared_heads": False}


@pytest.mark.parametrize("case", CASES)
def test_untrained_it_computes_what_it_did_at_every_size(case):
    original = build(case, **({} if case in NAFLEX else {"dynamic_img_size": True}))
    joint = {"layout": "joint", "bucketing": "piecewise", "max_distance": 2}
    models = [retrofitted(original, trained=False, **kwargs) for kwargs in ({}, OTHERS, joint)]
    assert isinstance(models[0], CASES[case][0])
    for size in SIZES:
        x = images(*size)
        expected = original(x)
        for model in models:
            torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-12)
    assert (retrofitted(original)(x) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("case", {**VITS, **EVAS})
def test_a_model_for_one_size_keeps_its_outputs_there_and_takes_others(case):
    if case == "rope mixed":
        # At other sizes, older versions of timm multiply single by double precision, which fails.
        since("1.0.31")
    original = build(case)
    model = retrofitted(original, trained=False)
    torch.testing.assert_close(model(images()), original(images()), rtol=0, atol=1e-12)
    # A timm model for all sizes with the same weights gives the same outputs, up to timm's float32 computations.
    flexible = build(case, dynamic_img_size=True)
    for size in SIZES[1:]:
        torch.testing.assert_close(model(images(*size)), flexible(images(*size)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", NAFLEX)
def test_padded_batches_of_naflex(case):
    original = build(case, embed_proj_type="linear")
    untrained, trained = retrofitted(original, trained=False), retrofitted(original, max_distance=1)
    batch = naflex_batch()
    torch.testing.assert_close(untrained(batch), original(batch), rtol=0, atol=1e-12)
    together = trained(batch)
    assert (together - original(batch)).abs().max() > 1e-3
    # Compute each image alone, without padding; the first one also as a tensor of pixels, for which timm rotates in
    # float32.
    for sample, count in enumerate((6, 8)):
        alone = trained({name: part[sample : sample + 1, :count] for name, part in batch.items()})
        torch.testing.assert_close(together[sample : sample + 1], alone, rtol=0, atol=1e-10)
    pixels = batch["patches"][:1, :6].unflatten(2, (8, 8, 3)).unflatten(1, (3, 2))
    pixels = pixels.permute(0, 5, 1, 3, 2, 4).reshape(1, 3, 24, 16)
    torch.testing.assert_close(together[:1], trained(pixels), rtol=0, atol=1e-6)


def test_naflex_coordinates_beyond_max_grid_are_an_error_that_names_it():
    model = relvit.retrofit(build("naflex", embed_proj_type="linear"), max_grid=(3, 4))
    model(naflex_batch())
    model.max_grid = (3, 3)
    with pytest.raises(
        ValueError, match=r"columns from 0 to 3, .* allows images of up to 3 x 3 patches: set model.max_grid"
    ):
        model(naflex_batch())
    assert model(images(64, 40)).shape == (2, 5)


def grid_of(model, x):
    """Return the features, and the grid that the first block gets."""
    seen = []

    def look(_module, _args, kwargs):
        given = [part for part in (kwargs.get("rope"), kwargs.get("attn_mask")) if isinstance(part, GridArgument)]
        seen.append(given[0].grid)

    handle = model.blocks[0].attn.register_forward_pre_hook(look, with_kwargs=True)
    features = model.forward_features(x)
    handle.remove()
    return features, seen[0]


@pytest.mark.parametrize("case", EACH)
def test_dropped_patches_keep_their_coordinates(case):
    model = retrofitted(build(case, patch_drop_rate=0.5), "qkvb", max_distance=1).train()
    prefix, x = model.num_prefix_tokens, images(32, 24)
    torch.manual_seed(5)
    features, grid = grid_of(model, x)
    assert (grid.height, grid.width, grid.coords.shape) == (4, 3, (2, 6, 2))
    kept = grid.coords[..., 0] * 3 + grid.coords[..., 1] + prefix
    kept = torch.cat((torch.arange(prefix).expand(2, -1), kept), dim=1)
    # Instead of dropping patches, forbid attention to them by a mask.
    mask = torch.zeros(2, 1, 1, prefix + 12, dtype=torch.bool).scatter(-1, kept[:, None, None, :], True)
    if case in NAFLEX:
        mask = torch.zeros_like(mask, dtype=torch.float64).masked_fill(~mask, -math.inf)
    masked = model.eval().forward_features(x, attn_mask=mask)
    torch.testing.assert_close(features, masked.gather(1, kept[..., None].expand(-1, -1, 24)), rtol=0, atol=1e-6)


def test_dropped_patches_of_a_padded_batch_keep_their_coordinates():
    model = retrofitted(build("naflex", embed_proj_type="linear", patch_drop_rate=0.5), max_distance=1).train()
    batch = naflex_batch()
    embeds = model._forward_embeds(batch["patches"], batch["patch_coord"], batch["patch_valid"], None)
    for coords, given, kept in zip(
        embeds["attn_mask"].grid.coords, batch["patch_coord"], embeds["keep_indices"], strict=True
    ):
        assert torch.equal(coords, given[kept])


def test_what_replaces_patch_dropout_changes_the_tokens():
    original, x = build("clip"), images()
    original.patch_drop.register_forward_hook(lambda _module, _inputs, tokens: tokens.flip(2))
    model = retrofitted(original, trained=False)
    torch.testing.assert_close(model(x), original(x), rtol=0, atol=1e-12)
    # timm's `PatchDropout` does not tell which patches it has kept, so their coordinates are unknown.
    model.patch_drop = PatchDropout(0.5)
    with pytest.raises(ValueError, match="4 tokens, expected 7"):
        model(x)


@pytest.mark.parametrize("case", ["deit distilled", "siglip", "eva", "naflex mixed"])
def test_absolute_embeddings_are_frozen_or_dropped(case):
    original = build(case)
    owner = "embeds." if case in NAFLEX else ""
    names = [name for name, _ in original.named_parameters() if name.startswith(f"{owner}pos_embed")]
    assert names
    frozen = retrofitted(original, abs_pos="freeze")
    assert {name for name, p in frozen.named_parameters() if not p.requires_grad} == set(names)
    torch.testing.assert_close(frozen(images()), retrofitted(original)(images()), rtol=0, atol=0)
    # Without its absolute embedding, the model equals the original with an embedding of zeros.
    zeroed = copy.deepcopy(original)
    for name in names:
        nn.init.zeros_(zeroed.get_parameter(name))
    dropped = retrofitted(original, trained=False, abs_pos="drop")
    assert not set(names) & set(dropped.state_dict())
    torch.testing.assert_close(dropped(images()), zeroed(images()), rtol=0, atol=1e-12)
    assert torch.isfinite(dropped(images(8, 40))).all()


def test_a_size_that_leaves_a_remainder_stays_the_one_the_model_was_made_for():
    arguments = {"img_size": (27, 20), "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 5}
    original = VisionTransformer(**arguments).eval()
    model = retrofitted(original, trained=False)
    torch.testing.assert_close(model(images(27, 20).float()), original(images(27, 20).float()), rtol=0, atol=1e-6)
    assert model(images(32, 8).float()).shape == (2, 5)
    with pytest.raises(ValueError, match="image height 28 is not a multiple of the patch size 8: use 24 or 32"):
        model(images(28, 16).float())


def test_convolutional_stems():
    # The stem of `vit_small_r26_s32_224` is a larger ResNet, which has a module named `blocks`, too.
    shape = {"layers": (1,), "channels": (8,), "stem_chs": 6, "norm_layer": BatchNormAct2d}
    stem = ResNetV2(**shape, num_classes=0, global_pool="", preact=False)
    arguments = {"img_size": (24, 16), "patch_size": 2, "embed_dim": 24, "depth": 1, "num_heads": 2, "num_classes": 5}
    original = VisionTransformer(**arguments, embed_layer=partial(HybridEmbed, stem)).eval()
    model = retrofitted(original, trained=False)
    torch.testing.assert_close(model(images().float()), original(images().float()), rtol=0, atol=1e-6)
    _, grid = grid_of(model, images(32, 40).float())
    assert (grid.height, grid.width) == (4, 5)


def test_a_clip_distance_is_for_every_position_that_clips():
    model = relvit.retrofit(build("clip"), position="slopes", max_distance=(2, 3))
    assert {block.attn.position.max_distance for block in model.blocks} == {(2, 3)}


@pytest.mark.parametrize("case", ["dinov2", "eva02", "beit"])
def test_blocks_may_share_their_attention(case):
    original, x = build(case), images()
    original.blocks[1].attn = original.blocks[0].attn
    model = relvit.retrofit(copy.deepcopy(original))
    assert model.blocks[0].attn is model.blocks[1].attn
    torch.testing.assert_close(model(x), original(x), rtol=0, atol=1e-10)


def test_slopes_are_the_biases_that_they_are():
    model = retrofitted(build("clip"), trained=False, position="slopes")
    assert not tables(model)
    other = retrofitted(build("clip"), "b", trained=False, max_distance=(3, 3))
    for block, fixed in zip(other.blocks, model.blocks, strict=True):
        for table in (block.attn.position.bias_rows, block.attn.position.bias_cols):
            table.data = -fixed.attn.position.slopes.double()[:, None] * torch.arange(-3, 4).abs()
    torch.testing.assert_close(model(images()), other(images()), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("case", "position"),
    [("siglip", "fire"), ("eva02", "pape"), ("clip", "cpb"), ("dinov2", "low-rank"), ("naflex", "xl")],
)
def test_learned_positions_start_as_the_original_and_then_change_it(case, position):
    original, x = build(case), images(40, 16)
    model = retrofitted(original, trained=False, position=position)
    expected = retrofitted(original, "", abs_pos="keep")(x)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-10)
    assert (retrofitted(original, position=position)(x) - expected).abs().max() > 1e-6


@pytest.mark.parametrize("case", ["siglip", "eva02", "grouped", "naflex"])
def test_transformer_xl_adds_what_its_layer_does(case):
    original = build(case)
    x = images(40, 16)
    model = retrofitted(original, position="xl")
    # If W_R is zero, v has no effect, and u is only a bias of the queries.
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.position.row_weight)
        torch.nn.init.zeros_(block.attn.position.col_weight)
    shifted = retrofitted(original, "")
    for block, of in zip(shifted.blocks, model.blocks, strict=True):
        bias = of.attn.position.content_bias
        block.attn.q_norm.register_forward_hook(lambda _module, _inputs, q, bias=bias: q + bias[:, None])
    torch.testing.assert_close(model(x), shifted(x), rtol=0, atol=1e-10)


def test_modes_dtypes_devices_hooks_and_attributes_are_kept():
    original = build("dinov2").to(torch.bfloat16)
    original.pretrained_cfg = {"architecture": "mine"}
    called = []
    original.blocks[0].attn.register_forward_hook(lambda *_: called.append(True))
    model = relvit.retrofit(original)
    assert model is original
    assert model.pretrained_cfg == {"architecture": "mine"}
    model(images().to(torch.bfloat16))
    assert called == [True]
    assert all(table.dtype == torch.bfloat16 for table in tables(model).values())
    assert not any(module.training for module in model.modules())
    with torch.device("meta"):
        bare = relvit.retrofit(timm.create_model("vit_tiny_patch16_224"))
    assert len(tables(bare)) == 12 * 4
    assert all(table.is_meta for table in tables(bare).values())


def test_arguments_reach_the_tables():
    model = relvit.retrofit(build("eva"), "kb", max_distance=(2, 3), shared_heads=False, init_std=0.5, backend="fused")
    for block in model.blocks:
        position = block.attn.position
        assert position.key_rows.shape == (2, 5, 12)
        assert position.bias_cols.shape == (2, 7)
        assert 0.2 < position.key_cols.std() < 0.8
        assert block.attn.backend == "fused"
