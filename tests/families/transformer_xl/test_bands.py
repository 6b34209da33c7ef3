"""Images in bands compared with one pass under a mask, gradients of an explicit loop, tiles, refused models."""

import copy
import re

import pytest
import torch
from packaging.version import Version
from retrofit_cases import build as build_timm
from retrofit_cases import retrofitted
from vits import band_mask, images, small

from relvit.families.transformer_xl import classify_bands, forward_segment, set_bands
from relvit.layers import AnySizePatchEmbed, FirePosition2d
from relvit.models import attention_maps, logit_inputs, set_reach
from relvit.ops import Grid, make_grid, relative_attention

# The grid has 7 x 3 patches, and 7 is not a multiple of the bands' rows.
HEIGHT, WIDTH = 56, 24


def build(**options):
    return small(**{"depth": 3, "position": "xl", **options}).double().eval()


def photos(height=HEIGHT, width=WIDTH, **options):
    return images(height, width, **{"dtype": torch.float64, **options})


TABLES = {"position": "tables", "rel_terms": "qkvb", "depth": 4}


@pytest.mark.parametrize(
    ("options", "band", "memory"),
    [
        ({}, 2, None),
        ({}, 9, 0),
        (TABLES, 1, 3),
        (TABLES, 2, 0),
        (TABLES, 2, 1),
        ({"position": "slopes", "depth": 1}, 2, 1),
    ],
    ids=str,
)
def test_equal_to_one_pass_under_the_mask_at_every_depth(options, band, memory):
    model, x = build(**options), photos()
    mask = band_mask(7, 3, band, memory)
    features, logits = model.forward_features(x, attn_mask=mask), model(x, attn_mask=mask)
    assert set_bands(model, band, memory) is model
    torch.testing.assert_close(model.forward_features(x), features, rtol=0, atol=1e-10)
    # A second call must not see the memory of the first image.
    for _ in range(2):
        torch.testing.assert_close(model(x), logits, rtol=0, atol=1e-10)


def test_blocks_may_be_of_a_derived_class_as_fully_shard_makes_them():
    model, x = set_bands(build(), 2), photos()
    expected = model(x)
    for block in model.blocks:
        block.__class__ = type("FSDPRelativeBlock", (type(block),), {})
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_single_precision_and_autocast_are_near():
    model, x = small(position="xl", std=0.1, depth=6).eval(), images(HEIGHT, WIDTH)
    expected = model(x, attn_mask=band_mask(7, 3, 2, None))
    set_bands(model, 2)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = model(x)
    torch.testing.assert_close(half.float(), expected, rtol=0, atol=0.05 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("global_pool", ["avg", "max", "map", ""])
def test_made_with_bands_pooled_and_padded(global_pool):
    model = build(global_pool=global_pool, band_rows=2, memory_rows=3, dynamic_img_pad=True)
    x = photos(HEIGHT - 3, WIDTH - 5)
    plain = set_bands(copy.deepcopy(model), None)
    expected = plain(x, attn_mask=band_mask(7, 3, 2, 3))
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(model.forward_head(model.forward_features(x)), expected, rtol=0, atol=1e-10)
    assert model.state_dict().keys() == plain.state_dict().keys()


def loop_by_hand(model, x, band, memory):
    """Compute all tokens in a loop over bands, with detached inputs of each layer as additional keys."""
    tokens = model.patch_embed.proj(x).flatten(3).permute(0, 2, 3, 1)
    kept, out = [tokens[:, :0] for _ in model.blocks], []
    for top in range(0, tokens.shape[1], band):
        y = tokens[:, top : top + band]
        for index, block in enumerate(model.blocks):
            both = torch.cat((kept[index].detach(), y), dim=1)
            before, height = kept[index].shape[1], both.shape[1]
            kept[index] = both[:, max(0, height - memory) :]
            attn = block.attn
            q, k, v = (
                part.unflatten(-1, (2, 6)).flatten(1, 2).transpose(1, 2)
                for part in attn.qkv(block.norm1(both)).chunk(3, dim=-1)
            )
            coords = torch.cartesian_prod(torch.arange(before, height), torch.arange(3))
            q = q[:, :, 3 * before :]
            grid, key_grid = make_grid(height, 3, coords=coords), make_grid(height, 3)
            mixed = relative_attention(q, k, v, attn.position(key_grid), grid, key_grid, backend="reference")
            y = y + attn.proj(mixed.transpose(1, 2).flatten(2)).unflatten(1, (-1, 3))
            y = y + block.mlp(block.norm2(y))
        out.append(model.norm(y))
    return model.forward_head(torch.cat(out, dim=1).flatten(1, 2))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_explicit_loop_and_not_of_the_full_pass(checkpointing):
    model, x = build(), photos()
    parameters = list(model.parameters())
    full, expected = (
        torch.autograd.grad(out.square().sum(), parameters)
        for out in (model(x, attn_mask=band_mask(7, 3, 2, 3)), loop_by_hand(model, x, 2, 3))
    )
    set_bands(model, 2, 3).set_grad_checkpointing(checkpointing)
    got = torch.autograd.grad(model.train()(x).square().sum(), parameters)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert any((one - other).abs().max() > 1e-3 for one, other in zip(got, full, strict=True))


def test_bands_that_come_one_by_one_and_how_much_is_kept():
    model, x = build(), photos()
    expected = set_bands(copy.deepcopy(model), 2, 3)(x)
    # Bands may have different heights, as long as the mask has the same bands.
    torch.testing.assert_close(classify_bands(model, iter(x.split(16, dim=2)), 3), expected, rtol=0, atol=1e-12)
    memory, kept = None, []
    for band in x.split(16, dim=2):
        _, memory = forward_segment(model, band, memory, memory_rows=3)
        kept.append((memory.regions[0].top, memory.regions[0].rows))
        assert all(not state.requires_grad and state.shape[1] == 3 * kept[-1][1] for state in memory.states)
    assert kept == [(0, 2), (1, 3), (3, 3), (4, 3)]


def test_tiles_attend_to_earlier_tiles_of_the_image():
    model, x = build(position="tables", max_distance=2), photos(32, 40)
    tiles = [(0, 0, 2, 3), (0, 3, 2, 2), (2, 0, 2, 3), (2, 3, 2, 2)]  # The image has 4 x 5 patches.
    owner = torch.zeros(4, 5, dtype=torch.long)
    for number, (top, left, rows, columns) in enumerate(tiles):
        owner[top : top + rows, left : left + columns] = number
    # A memory of four rows holds the last two tiles, so a tile attends to itself and to two earlier tiles.
    age = owner.flatten()[:, None] - owner.flatten()
    expected = model.forward_features(x, attn_mask=(age >= 0) & (age <= 2)).unflatten(1, (4, 5))
    memory = None
    for top, left, rows, columns in tiles:
        area = (slice(top, top + rows), slice(left, left + columns))
        pixels = x[:, :, 8 * top : 8 * (top + rows), 8 * left : 8 * (left + columns)]
        tokens, memory = forward_segment(model, pixels, memory, memory_rows=4, start=(top, left))
        torch.testing.assert_close(tokens, expected[:, *area].flatten(1, 2), rtol=0, atol=1e-10)
    assert [region.top for region in memory.regions] == [2, 2]


def test_frames_at_the_same_coordinates():
    model, first, second = build(depth=1), photos(24, 16), photos(24, 16) + 1
    _, memory = forward_segment(model, first)
    tokens, _ = forward_segment(model, second, memory, start=(0, 0))
    coords = torch.cartesian_prod(torch.arange(3), torch.arange(2))
    earlier, own = (model.embed(frame)[0] for frame in (first, second))
    key_grid = make_grid(3, 2, coords=coords.repeat(2, 1))
    expected = model.norm(model.blocks[0](own, Grid(3, 2), memory=earlier, key_grid=key_grid))
    torch.testing.assert_close(tokens, expected, rtol=0, atol=1e-12)


def test_reach_in_bands_of_the_trained_height():
    # The model is made for 3 x 2 patches.
    model, x = build(), photos()
    plain, expected = model(x), model(x, attn_mask=band_mask(7, 3, 3, 3))
    torch.testing.assert_close(set_reach(model, "bands")(x), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(set_reach(model, "trained")(x), plain, rtol=0, atol=1e-12)
    set_reach(model, "bands", trained_size=(40, 16))
    assert tuple(model.recurrence) == (5, 5)
    # `set_reach` keeps the bands with which a model was made.
    assert tuple(set_reach(build(band_rows=2), "trained").recurrence) == (2, None)


@pytest.mark.slow
@pytest.mark.skipif(Version(torch.__version__) < Version("2.11"), reason="PyTorch >= 2.11: a graph of generators")
def test_compiled_training_step():
    # The image has three bands, of 2, 2 and 1 rows. Few bands and layers keep the compiled graph small.
    model, x = small(position="xl", band_rows=2, memory_rows=1, depth=1), images(40, WIDTH)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(net(x).square().sum(), list(model.parameters())) for net in (model, compiled)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


class Stem(AnySizePatchEmbed):
    """A user's own patch embedding."""


def native():
    coord = torch.tensor([[[0, 0], [0, 1]]])
    valid = torch.ones(1, 2, dtype=torch.bool)
    return {"patches": torch.zeros(1, 2, 8, 8, 3).double(), "patch_coord": coord, "patch_valid": valid}


def of_another_batch():
    model = build()
    return forward_segment(model, photos(batch=3), forward_segment(model, photos())[1])


def of_another_model():
    return forward_segment(build(depth=2), photos(), forward_segment(build(depth=3), photos())[1])


def fire_inside_of_another(*sizes, **like):
    return torch.nn.Sequential(FirePosition2d(*sizes, **like))


REFUSED = [
    (lambda: build(band_rows=0), "band_rows must be at least 1, got 0"),
    (lambda: build(band_rows=2, memory_rows=-1), "memory_rows must be at least 0, got -1"),
    (lambda: build(memory_rows=2), "memory_rows=2 is for images in bands: give band_rows too"),
    (lambda: build(band_rows=2, class_token=True), "cannot compute in bands: its class token or registers are in no"),
    (lambda: build(band_rows=2, pos_embed="learn"), "its absolute embedding depends on the height of the image"),
    (lambda: build(band_rows=2, pos_embed="axial"), "its absolute embedding depends on the height of the image"),
    (lambda: build(band_rows=2, position="fire"), "its FirePosition2d depends on the size of the image"),
    (lambda: build(band_rows=2, position=fire_inside_of_another), "its Sequential depends on the size of the image"),
    (lambda: build(band_rows=2, position="low-rank"), "its LowRankPosition2d depends on the size of the image"),
    (lambda: set_reach(build(position="fire"), "bands"), "its FirePosition2d depends on the size of the image"),
    (lambda: build(band_rows=2, patch_drop_rate=0.5), "it drops patches: patch_drop_rate=0"),
    (lambda: build(band_rows=2, reversible=True), "it is reversible, and a memory would be kept for backward"),
    (lambda: build(band_rows=2, embed_layer=Stem), "its patch embedding Stem may look beyond a patch"),
    (lambda: set_bands(small("relvit_aft_conv_tiny"), 2), "AFTVisionTransformer cannot compute in bands: its blocks"),
    (lambda: set_reach(retrofitted(build_timm("siglip")), "bands"), "cannot compute in bands: its blocks are not"),
    (lambda: set_reach(build(band_rows=2), "stretch"), r"which computes in parts already: leave it out"),
    (
        lambda: forward_segment(build(), photos(), forward_segment(build(), photos())),
        "memory must be the second value",
    ),
    (lambda: set_bands(set_reach(build(), "stretch"), 2), "bands need reach 'trained'"),
    (lambda: forward_segment(set_reach(build(), "logn"), photos()), "bands need reach 'trained'"),
    (lambda: build(band_rows=2)(native()), r"bands are for images \(B, in_chans, height, width\), got dict"),
    (lambda: build(band_rows=2)(photos(HEIGHT - 1)), "image height 55 is not a multiple of the patch size 8"),
    (lambda: build(band_rows=2)(photos(), is_causal=True), "takes no attn_mask and is not causal"),
    (lambda: build(band_rows=2).forward_intermediates(photos()), "features of single blocks: they are computed in"),
    (
        lambda: build(band_rows=2, features_only=True, feature_cls="hook", out_indices=(0, 2)),
        "features of test_relvit need feature_cls 'getter', got 'hook': they are computed in bands",
    ),
    (lambda: attention_maps(build(band_rows=2), photos()), "there are no N x N weights in bands"),
    (lambda: classify_bands(build(global_pool="max"), [photos()]), "'avg' alone, got 'max': build the model with"),
    (lambda: classify_bands(build(), []), "no band is given"),
    (
        of_another_batch,
        "this segment has a batch of 3, and the segments before it one of 2: all segments need the same",
    ),
    (lambda: classify_bands(build(), [photos(), photos(batch=3)]), "this segment has a batch of 3, and the segments"),
    (of_another_model, "the memory is of another model: begin with memory=None"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_start_is_a_row_and_a_column_of_which_only_differences_count():
    for start in (3, (0, 0, 0)):
        expected = f"start must be (row, column) of the segment's first patch, got {start}"
        with pytest.raises(TypeError, match=re.escape(expected)):
            forward_segment(build(), photos(), start=start)
    with pytest.raises(TypeError, match=r"band_rows must be an integer, got \(2, 2\)"):
        build(band_rows=(2, 2))
    model = build()
    shifted = []
    for row, column in ((0, 0), (-5, -9)):
        _, memory = forward_segment(model, photos(), start=(row + 4, column + 1))
        shifted.append(forward_segment(model, photos(), memory, start=(row, column))[0])
    torch.testing.assert_close(*shifted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            attention_maps,
            r"N x N weights in bands: call set_bands\(model, None\) and set_reach\(model, 'trained'\) first",
        ),
        (logit_inputs, r"call set_bands\(model, None\) first$"),
        (lambda model, x: model.forward_features(x, keep=torch.tensor([[0, 2]])), r"call set_bands\(model, None\)$"),
    ],
)
@pytest.mark.parametrize("reach", ["trained", "bands"])
def test_the_advice_for_whole_images_works(call, message, reach):
    model = set_reach(build(depth=1), reach) if reach == "bands" else build(band_rows=2, depth=1)
    with pytest.raises(ValueError, match=message):
        call(model, photos(batch=1))
    call(set_bands(model, None), photos(batch=1))
