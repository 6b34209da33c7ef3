"""Protocols of evaluation at an image size, compared with Pillow and numpy.pad, for single images and for batches."""

import numpy as np
import pytest
import torch
from PIL import Image

from relvit.app.data import eval_transform
from relvit.app.data.transforms import BatchTransform

MEAN, STD = (0.5, 0.4, 0.3), (0.25, 0.5, 0.125)


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def normalised(pixels):
    """Normalise (..., H, W, 3) to (..., 3, H, W)."""
    return torch.from_numpy(np.moveaxis((pixels / 255 - MEAN) / STD, -1, -3)).float()


def padded_and_cropped(pixels, size, fill):
    """Pad by numpy.pad on all sides until any size is inside, then crop the centre."""
    beyond = 2 * max(size)
    widths = ((beyond, beyond), (beyond, beyond), (0, 0))
    if fill == "reflect":
        padded = np.pad(pixels, widths, mode="reflect")
    else:
        grey = [round(255 * value) for value in MEAN]
        padded = np.stack([np.pad(pixels[..., i], beyond, constant_values=grey[i]) for i in range(3)], -1)
    # torchvision's CenterCrop rounds half a pixel to even, and pads one pixel more behind than before.
    starts = []
    for length, wanted in zip(pixels.shape, size, strict=False):
        starts.append(beyond + (round((length - wanted) / 2) if length >= wanted else -((wanted - length) // 2)))
    top, left = starts
    return padded[top : top + size[0], left : left + size[1]]


@pytest.mark.parametrize("fill", ["reflect", "grey"])
@pytest.mark.parametrize("size", [(4, 7), (12, 20), (13, 21), (25, 33), (64, 5), (61, 150)], ids=str)
@pytest.mark.parametrize("stored", [(30, 25), (12, 20), (7, 40), (1, 1)], ids=str)
def test_field_keeps_the_scale_and_continues_the_image(stored, size, fill):
    """The training had images of 12 x 20 px and a `crop_pct` of 0.8, so an image is scaled to cover 15 x 25 px."""
    image = Image.fromarray(noise(*stored, 3))
    scale = max(15 / stored[0], 25 / stored[1])
    covering = image.resize((round(stored[1] * scale), round(stored[0] * scale)), Image.Resampling.BICUBIC)
    out = eval_transform(size, MEAN, STD, 0.8, "field", (12, 20), fill)(image)
    torch.testing.assert_close(out, normalised(padded_and_cropped(np.asarray(covering), size, fill)))


def test_grey_images_and_one_pixel():
    image = Image.fromarray(np.full((1, 1), 200, np.uint8))
    reflected = eval_transform((3, 5), (0.5,), (1.0,), 1.0, "field", 1)(image)
    torch.testing.assert_close(reflected, torch.full((1, 3, 5), 200 / 255 - 0.5))
    grey = eval_transform((3, 5), (0.2,), (1.0,), 1.0, "field", 1, "grey")(image)
    expected = torch.zeros(1, 3, 5)
    expected[0, 1, 2] = 200 / 255 - 0.2
    torch.testing.assert_close(grey, expected)


@pytest.mark.parametrize("fill", ["reflect", "grey"])
@pytest.mark.parametrize("size", [(5, 8), (8, 12), (9, 40)], ids=str)
def test_a_batch_of_field_is_what_single_images_are(size, fill):
    pixels = noise(3, 8, 12, 3)
    options = (MEAN, STD, 1.0, "field", (8, 12), fill)
    transform = eval_transform(size, *options)
    batch = BatchTransform.like(transform, (8, 12))(torch.from_numpy(pixels))
    single = torch.stack([transform(Image.fromarray(image)) for image in pixels])
    torch.testing.assert_close(batch, single)
    torch.testing.assert_close(batch, normalised(np.stack([padded_and_cropped(p, size, fill) for p in pixels])))


@pytest.mark.parametrize(
    "options",
    [
        ((12, 20), 0.9, "crop"),
        ((6, 5), 0.9, "crop"),
        # The number of rows or columns that the crop leaves out is odd.
        ((7, 11), 0.9, "crop"),
        ((6, 9), 0.75, "crop"),
        ((7, 9), 0.7, "crop"),
        ((16, 9), 0.9, "resize"),
        ((8, 12), 1.0, "resize"),
        ((16, 9), 0.8, "field", (6, 8), "reflect"),
        ((40, 30), 0.8, "field", (10, 9), "grey"),
    ],
    ids=str,
)
def test_batches_that_are_resized(options):
    """Pillow rounds the weights of bicubic resizing to 8 bits, so some pixels differ by 1, and a few by 2."""
    size, crop_pct, *protocol = options
    pixels = noise(4, 8, 12, 3)
    transform = eval_transform(size, MEAN, STD, crop_pct, *protocol)
    batch = BatchTransform.like(transform, (8, 12))(torch.from_numpy(pixels))
    single = torch.stack([transform(Image.fromarray(image)) for image in pixels])
    assert batch.shape == single.shape == (4, 3, *size)
    difference = (batch - single).abs() * torch.tensor(STD)[:, None, None] * 255
    assert difference.max() < 2.5
    assert difference.mean() < 0.5


def test_images_too_long_for_batches():
    assert BatchTransform.like(eval_transform((8, 8), MEAN, STD), (1, 100)) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("fields",), r"protocol is 'fields'; allowed are 'crop', 'resize', 'field' \(did you mean 'field'\?\)"),
        (("field",), "protocol 'field' keeps the scale that objects had in training: give trained_size"),
        (("field", 8, "gray"), r"fill is 'gray'; allowed are 'reflect', 'grey' \(did you mean 'grey'\?\)"),
        (("resize", 8, "grey"), "fill 'grey' is for protocol 'field', not 'resize': leave it out"),
        (("field", (8, 0)), "img_size is .*give a positive integer"),
    ],
)
def test_wrong_protocols(options, message):
    with pytest.raises(ValueError, match=message):
        eval_transform(8, MEAN, STD, 1.0, *options)
