"""Images in the forms that users have (arrays, PIL images, tensors), compared with known pixels."""

import numpy as np
import pytest
import torch
from PIL import Image

from relvit.app.data import load_rgb
from relvit.app.data.images.given_images import to_pil

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)


def same(image, expected):
    found = to_pil(image)
    assert found.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(found), expected)


def test_every_form_of_the_same_pixels(tmp_path):
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    channels_first = torch.from_numpy(PIXELS).permute(2, 0, 1)
    for image in (
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        Image.fromarray(PIXELS),
        Image.open(tmp_path / "a.png"),
        PIXELS,
        PIXELS[::-1][::-1],
        PIXELS / 255,
        (PIXELS[::-1] / np.float32(255))[::-1],
        channels_first,
        channels_first / 255,
        (channels_first / 255).double().requires_grad_(),
    ):
        same(image, PIXELS)


def test_grey_and_transparent_ones():
    grey = PIXELS[..., 0]
    for image in (grey, grey[..., None], Image.fromarray(grey), torch.from_numpy(grey.copy())[None]):
        same(image, np.repeat(grey[..., None], 3, -1))
    alpha = np.dstack((PIXELS, np.zeros((5, 7), np.uint8)))
    alpha[0, :, 3] = 255
    expected = np.full_like(PIXELS, 255)
    expected[0] = PIXELS[0]
    same(alpha, expected)
    same(Image.fromarray(alpha), expected)


def test_pil_images_are_seen_as_files_are(tmp_path):
    # EXIF orientation 6 means that viewers turn the image by 90 degrees clockwise.
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PIXELS).save(tmp_path / "turned.png", exif=exif)
    same(Image.open(tmp_path / "turned.png"), np.rot90(PIXELS, -1))
    deep = np.arange(35, dtype=np.uint16).reshape(5, 7) * 1800
    Image.fromarray(deep).save(tmp_path / "deep.png")
    expected = np.repeat(np.round(deep / 257).astype(np.uint8)[..., None], 3, -1)
    same(Image.open(tmp_path / "deep.png"), expected)
    same(Image.fromarray(deep), expected)
    # Pillow opens 2-bit grey with a transparent colour without scaling that colour to 8 bits.
    palette = Image.fromarray(np.array([[0, 1], [0, 1]], np.uint8), "L").convert("P")
    palette.save(tmp_path / "palette.png", transparency=1)
    same(Image.open(tmp_path / "palette.png"), np.asarray(load_rgb(tmp_path / "palette.png")))


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (
            3,
            TypeError,
            "an image is a path, a PIL image, an array or a tensor, got int.*several images are a list or tuple$",
        ),
        (
            PIXELS.astype(np.float32),
            ValueError,
            "an array with values from 0 to 255 is not an image; arrays .* floating point in 0..1",
        ),
        (PIXELS.astype(np.int64), TypeError, "an array of dtype int64 is not an image"),
        (np.zeros((3, 5, 7), np.uint8), ValueError, r"an array of shape \(3, 5, 7\) is not an image"),
        (np.zeros((0, 7, 3), np.uint8), ValueError, r"an array of shape \(0, 7, 3\)"),
        (torch.zeros(5, 7, 3), ValueError, r"a tensor of shape \(5, 7, 3\) is not an image; tensors are \(3, height"),
        (torch.zeros(3, 5, 7, dtype=torch.int64), TypeError, "a tensor of dtype torch.int64"),
        (torch.full((3, 5, 7), -1.5), ValueError, "a tensor with values from -1.5 to -1.5 .* not normalised"),
        (torch.full((3, 5, 7), torch.nan), ValueError, "from nan to nan"),
        ("nothing.jpg", ValueError, "cannot read image nothing.jpg: there is no such file"),
        (Image.new("F", (2, 2)), ValueError, "32-bit float pixels have no known range; scale its values to 8 bits"),
    ],
)
def test_what_is_no_image(image, error, message):
    with pytest.raises(error, match=message):
        to_pil(image)
