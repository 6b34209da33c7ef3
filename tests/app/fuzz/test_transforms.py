"""Images of random shapes: relvit's evaluation transform gives the same pixels as timm's.

FUZZ_EXAMPLES=4000 pytest tests/app/fuzz/test_transforms.py --hypothesis-seed=32
"""

import numpy as np
import pytest
from fuzzed import fuzzed
from hypothesis import note
from PIL import Image
from sample_files import write_sample
from timm.data import create_transform, resolve_model_data_config

import relvit
from relvit.app.data import eval_transform

# timm has other names for the protocols. relvit resizes by the bicubic filter alone.
PROTOCOLS = {"crop": "center", "resize": "squash", "field": "center"}
# No example resizes an image to more pixels than this, because it would take too long.
MOST = 10**6


def draw_side(random, most):
    """Draw the length of a side; small and large sides are equally probable."""
    return min(most, int(most ** random.random()) + random.randint(0, 2))


def draw_image(random, channels):
    """Draw noise or a smooth picture of any shape, sometimes a single row or column."""
    height, width = draw_side(random, 600), draw_side(random, 600)
    if random.random() < 0.15:
        height, width = random.choice([(height, 1), (1, width), (height, 2), (3, width)])
    pixels = np.random.default_rng(random.getrandbits(32)).integers(0, 256, (height, width, channels))
    if random.random() < 0.3:
        rows, columns = random.uniform(0, 9), random.uniform(0, 9)
        pixels = np.add.outer(rows * np.arange(height), columns * np.arange(width))[..., None].repeat(channels, -1)
    return Image.fromarray((pixels % 256).astype(np.uint8).squeeze(-1) if channels == 1 else pixels.astype(np.uint8))


def draw(random):
    """Draw an image and the arguments of `eval_transform`."""
    channels = random.choice([1, 3, 3])
    image = draw_image(random, channels)
    while True:
        # The input of a model is never a single row or column.
        side = draw_side(random, 400)
        size = side, random.choice([side, max(1, min(400, int(side * 16 ** random.uniform(-1, 1))))])
        crop_pct = random.choice([1.0, 0.875, 0.9, 0.95, 0.56, random.uniform(0.2, 1)])
        cover = max(side / crop_pct / whole for side, whole in zip(size, image.size[::-1], strict=True))
        if cover**2 * image.width * image.height < MOST:
            break
    mean, std = ([random.uniform(low, high) for _ in range(channels)] for low, high in ((0.2, 0.8), (0.2, 0.5)))
    return image, size, mean, std, crop_pct, random.choice(["crop", "crop", "resize", "field"])


def pixels_of(values, mean, std):
    """Return the 8-bit pixels (H, W, C) before normalisation, and how far they are from whole numbers."""
    found = (values.double().permute(1, 2, 0).numpy() * np.array(std) + np.array(mean)) * 255
    return found.round().astype(int), float(np.abs(found - found.round()).max())


def check(ours, timms, mean, std, long):
    """Check that the pixels are equal, or for very long images differ by at most two levels."""
    assert ours.shape == timms.shape
    (found, rest), (expected, other) = (pixels_of(values, mean, std) for values in (ours, timms))
    assert max(rest, other) <= 1e-3, "pixels are no whole numbers"
    assert np.abs(found - expected).max() <= 2 * long


def is_long(image, size, crop_pct):
    """Return whether only the middle of the image is resized, whose edges Pillow gets in single precision."""
    cover = eval_transform(size, (0.5,), (0.5,), crop_pct).transforms[0]
    whole, made = cover.sizes(image.size[::-1])
    return whole != made


@fuzzed(100)
def test_images_of_random_shapes_are_transformed_as_by_timm(chance):
    image, size, mean, std, crop_pct, protocol = draw(chance)
    note(f"{image.mode} {image.size[::-1]} to {size}, crop_pct {crop_pct}, {protocol}")
    extra = {"trained_size": size} if protocol == "field" else {}
    kept = {"crop_pct": 1.0 if protocol == "resize" else crop_pct, "crop_mode": PROTOCOLS[protocol]}
    ours = eval_transform(size, mean, std, crop_pct, protocol, **extra)
    timms = create_transform((len(mean), *size), mean=mean, std=std, interpolation="bicubic", **kept)
    check(ours(image), timms(image), mean, std, protocol != "resize" and is_long(image, size, crop_pct))


@pytest.fixture(scope="module", params=["tables", "aft_full", "retrofitted"])
def predictor(request, tmp_path_factory):
    return relvit.load(write_sample(tmp_path_factory.mktemp("sample") / "last.ckpt", request.param))


@pytest.mark.fuzz
@fuzzed(20)
def test_what_a_model_tells_timm_transforms_images_as_its_predictor(predictor, chance):
    """timm's `resolve_model_data_config` reads `pretrained_cfg`, which published folders also have."""
    timms = create_transform(**resolve_model_data_config(predictor.model))
    image = draw_image(chance, len(predictor.mean))
    note(str(image))
    long = is_long(image, predictor.img_size, predictor.crop_pct)
    check(predictor.transform(image), timms(image), predictor.mean, predictor.std, long)
