"""SAM's encoders of transformers and segment_anything at other sizes; two processes, mask decoder, graphs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from comparisons import assert_equal
from own_positions import imported, outputs
from processes import Ranks, as_torchrun
from retrofit_cases import images
from sam_cases import ddp_steps, sam_blocks, sam_encoder, sam_model, sgd_batches, sgd_steps
from torch import nn

import relvit
from relvit.models import logit_inputs

TRAINED = (56, 56)
# The grids lie on a square canvas of the trained size, a smaller one and larger ones, and are cut in both directions.
GRIDS = [(5, 7), (7, 3), (4, 6), (8, 9), (9, 4)]


def of_size(source, rows, columns):
    """Build the source for another grid: lengthen or shorten its tables, and cut its square embedding."""
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


@pytest.mark.parametrize("case", ["hf sam", "hf sam_hq", "segment_anything"])
def test_at_other_sizes_tables_have_their_edge_and_the_embedding_is_that_of_the_canvas(case):
    source = sam_encoder(case)
    model = imported(source)
    for grid in GRIDS if case == "hf sam" else GRIDS[1::2]:
        x = images(*(8 * side for side in grid))
        assert_equal(outputs(model, x), outputs(of_size(source, *grid), x), 1e-10)


@pytest.mark.slow
def test_two_processes_train_as_the_source_does_in_one(tmp_path):
    source = sam_encoder("hf sam").train()
    ranks = Ranks([tmp_path], tmp_path, as_torchrun(), ddp_steps)
    expected = sgd_steps(source, sgd_batches())
    assert ranks.finish(120) == [0, 0], ranks.text()
    for rank in range(2):
        assert_equal(torch.load(tmp_path / f"{rank}.pt"), expected, 1e-10)


def test_a_model_cut_to_another_size_after_it_was_built():
    """cellpose cuts the embedding of `segment_anything`'s model like this, and its tables are interpolated."""
    source = sam_encoder("segment_anything", img_size=64)
    source.pos_embed = nn.Parameter(source.pos_embed[:, ::2, ::2])
    for block in source.blocks:
        block.window_size = 0
    model, x = imported(source), images(32, 32)
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
    model, x = imported(sam_encoder("hf sam eager")), images(*TRAINED)
    with pytest.raises(ValueError, match=r"output_attentions: after relvit\.retrofit no attention weights are formed"):
        model(x, output_attentions=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["hf sam", "segment_anything"])
def test_compiled_and_exported(case):
    source = sam_encoder(case, **({"depth": 2} if case == "segment_anything" else {"num_hidden_layers": 2})).float()
    model = imported(source)
    torch.compiler.reset()
    compiled = torch.compile(model, dynamic=False, backend="aot_eager")
    # The first grid is the whole canvas, the second one a part of it.
    for grid in ((7, 7), (5, 7)):
        x = images(*(8 * side for side in grid)).float()
        name, expected = next(iter(outputs(of_size(source, *grid), x).items()))
        net = compiled if grid == (7, 7) else torch.export.export(model, (x,)).module()
        features = net(x) if case == "segment_anything" else net(x)[0]
        assert_equal({name: features}, {name: expected}, 1e-5)


def test_attention_maps_of_global_blocks_mix_the_values_to_the_output():
    model, x, seen = imported(sam_encoder("segment_anything")), images(40, 56), []
    attn = model.blocks[1].attn
    handle = attn.register_forward_hook(lambda _module, given, out: seen.append((given[0], out)))
    maps = relvit.attention_maps(model, x, [1])
    handle.remove()
    assert maps.grid == (5, 7)
    ((tokens, expected),) = seen
    value = attn.qkv(tokens).flatten(1, 2).unflatten(-1, (3, 2, -1))[:, :, 2].transpose(1, 2)
    found = attn.proj((maps.weights[0].double() @ value).transpose(1, 2).flatten(2)).view_as(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    # An image of 1 x 9 patches has the same number of patches as a window.
    for given in (x, images(8, 72)):
        with pytest.raises(
            ValueError, match=r"blocks.0.attn of RetrofittedImageEncoder computes windows, pooled tokens"
        ):
            logit_inputs(model, given)


def test_images_that_do_not_divide_into_patches():
    with pytest.raises(
        ValueError, match=r"image height 41 is not a multiple of the patch size 8: use 40 or 48 .as SAM does"
    ):
        imported(sam_encoder("segment_anything"))(images(41, 56))
