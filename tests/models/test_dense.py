"""Features of patches: decoders of segmentation_models_pytorch train on them, and they shift with the image."""

import copy

import pytest
import torch
from torch import nn
from vits import small

from relvit.models import set_reach
from relvit.ops import from_windows, to_windows

SHAPES = ((64, 96), (96, 32))
PATCH = 8


@pytest.mark.elsewhere
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tu-test_relvit", {"patch_size": 16}),
        ("tu-test_relvit", {"patch_size": 16, "class_token": True, "rel_terms": "qkvb"}),
        ("tu-retrofitted", {"model": "test_vit", "retrofit": {"rel_terms": "kv"}}),
    ],
)
def test_segmentation_models_pytorch_trains_at_two_shapes(name, options):
    smp = pytest.importorskip(
        "segmentation_models_pytorch", reason="pip install 'relvit[segmentation]' brings segmentation-models-pytorch"
    )
    torch.manual_seed(0)
    readout = "cat" if options.get("class_token") else "ignore"
    decoder = {"decoder_intermediate_channels": (16, 16, 16, 16), "decoder_fusion_channels": 16}
    net = smp.DPT(name, encoder_weights=None, decoder_readout=readout, classes=2, **decoder, **options)
    made = [squares(shape) for shape in SHAPES]
    optimizer, found = torch.optim.AdamW(net.parameters(), lr=2e-3), []
    for _ in range(10):
        loss = sum(nn.functional.cross_entropy(net(images), labels) for images, labels in made)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < 0.6 * found[0]
    tables = {name: p for name, p in net.encoder.named_parameters() if ".position." in name and p.requires_grad}
    assert tables
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in tables.values())


def squares(shape):
    """Make two images with a bright rectangle each, and a label for each pixel."""
    height, width = shape
    images, labels = 0.1 * torch.rand(2, 3, *shape), torch.zeros(2, *shape, dtype=torch.long)
    for number, (top, left) in enumerate(((8, 4), (height // 2, width // 3))):
        bottom, right = top + height // 3, left + width // 2
        images[number, :, top:bottom, left:right] += 0.8
        labels[number, top:bottom, left:right] = 1
    return images, labels


# The tests below shift an image. A shift is (rows, columns) of patches; the images are views of one larger picture.


def dense(**options):
    return small(max_distance=(2, 3), **options).double().eval().requires_grad_(False)


def maps(model, images, mask=None):
    """Return the normalised feature maps of all blocks, (B, dim, H, W) each."""
    return model.forward_intermediates(images, attn_mask=mask, norm=True, intermediates_only=True)


def view(picture, size, shift=(0, 0)):
    (rows, cols), (down, right) = size, shift
    return picture[..., PATCH * down : PATCH * (down + rows), PATCH * right : PATCH * (right + cols)]


def near(rows, cols, reach):
    """Return a mask (N, N) that is True for pairs of tokens at most `reach` rows and columns apart."""
    y, x = torch.arange(rows).repeat_interleave(cols), torch.arange(cols).repeat(rows)
    return ((y[:, None] - y).abs() <= reach) & ((x[:, None] - x).abs() <= reach)


def overlap(one, other, shift, border):
    """Cut out the places that are in both views and further than `border` patches from the border of either view."""
    (down, right), (rows, cols) = shift, one.shape[-2:]
    one = one[..., down + border : rows - border, right + border : cols - border]
    other = other[..., border : rows - down - border, border : cols - right - border]
    assert one.numel()
    return one, other


def test_with_local_attention_features_move_by_whole_patches():
    model, size, shift = dense(rel_terms="qkvb"), (15, 17), (1, 2)
    picture = torch.randn(1, 3, 20 * PATCH, 20 * PATCH, dtype=torch.float64)
    mask = near(*size, reach=1)
    both = maps(model, view(picture, size), mask), maps(model, view(picture, size, shift), mask)
    for depth, (one, other) in enumerate(zip(*both, strict=True), start=1):
        torch.testing.assert_close(*overlap(one, other, shift, border=depth), rtol=0, atol=1e-5)
        # Patches one step nearer to the border have features that depend on what the other view does not show.
        outer = overlap(one, other, shift, border=depth - 1)
        assert (outer[0] - outer[1]).abs().max() > 1e-5


def test_in_windows_features_move_by_whole_windows():
    model = set_reach(dense(), "windows", (2 * PATCH, 3 * PATCH))
    picture = torch.randn(1, 3, 12 * PATCH, 15 * PATCH, dtype=torch.float64)
    size = (8, 9)
    for shift, equal in (((2, 3), True), ((4, 6), True), ((1, 3), False)):
        one, other = maps(model, view(picture, size))[-1], maps(model, view(picture, size, shift))[-1]
        one, other = overlap(one, other, shift, border=0)
        assert (float((one - other).abs().max()) <= 1e-5) == equal


def test_blocks_without_a_window_attend_globally_between_blocks_with_windows():
    plain, size, x = dense(), (2, 3), torch.randn(2, 3, 5 * PATCH, 7 * PATCH, dtype=torch.float64)
    model = set_reach(copy.deepcopy(plain), "windows", (2 * PATCH, 3 * PATCH))
    model.blocks[1].attn.window = None
    tokens, grid = plain.embed(x)
    windows, window_grid = to_windows(tokens, grid, size)
    tokens = from_windows(plain.blocks[0](windows, window_grid), grid, size)
    expected = plain.blocks[1](tokens, grid)
    torch.testing.assert_close(maps(model, x)[1].flatten(2).mT, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("embedding", ["", "learn"])
def test_with_masked_surroundings_features_do_not_depend_on_the_place(embedding):
    """With global attention, features do not depend on the rest of the image if that rest is masked."""
    model = dense(pos_embed=embedding)
    thing = torch.randn(1, 3, 4 * PATCH, 5 * PATCH, dtype=torch.float64)
    found = []
    for (rows, cols), (down, right) in (((9, 11), (0, 0)), ((9, 11), (4, 5)), ((7, 12), (2, 6))):
        canvas = torch.randn(1, 3, rows * PATCH, cols * PATCH, dtype=torch.float64)
        view(canvas, (4, 5), (down, right)).copy_(thing)
        there = torch.zeros(rows, cols, dtype=torch.bool)
        there[down : down + 4, right : right + 5] = True
        features = maps(model, canvas, there.flatten()[None].expand(rows * cols, -1))[-1]
        found.append(features[..., down : down + 4, right : right + 5])
    same = [float((other - found[0]).abs().max()) <= 1e-5 for other in found[1:]]
    assert same == [not embedding] * 2
