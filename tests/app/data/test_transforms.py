"""Transforms: pixel values and positions, for single images and for batches."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from torchvision.transforms import v2

from relvit.app.data import eval_transform, parse_size, train_transform
from relvit.app.data.transforms import BatchTransform
from relvit.app.utils.seeding import seeded

ZERO, ONE = (0.0,), (1.0,)
AUGMENTS = ["none", "shift", "crop-flip", "resized-crop"]
RICH = ["deit", "three-augment", "three-augment-crop"]  # These need three channels.


def photo(height=40, width=56):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3)).astype(np.uint8))


def test_parse_size():
    assert parse_size(8) == (8, 8)
    assert parse_size([6, 4]) == (6, 4)
    assert parse_size((16384, 1)) == (16384, 1)
    with pytest.raises(ValueError, match="img_size is 16385; give sides of at most 16384 pixels"):
        parse_size(16385)
    for wrong in (0, -1, True, (8,), (8, 8, 3), (8, 0), (8.0, 8), "88", None, 8.0):
        with pytest.raises(ValueError, match=r"img_size is .*give a positive integer"):
            parse_size(wrong)


@pytest.mark.parametrize(("stored", "size"), [((300, 4), (4, 32)), ((433, 71), (6, 202)), ((4, 300), (32, 4))])
def test_the_middle_of_a_very_long_image_is_resized_as_the_whole_would_be(stored, size):
    """Bicubic filters overshoot at black and white pixels, so the order of the two directions matters."""
    image = Image.fromarray(np.random.default_rng(0).choice([0, 255], stored).astype(np.uint8))
    timms = create_transform((1, *size), mean=ZERO, std=(1 / 255,), crop_pct=1.0, interpolation="bicubic")
    found, expected = eval_transform(size, ZERO, (1 / 255,))(image), timms(image)
    assert (found - expected).abs().max() < 1.5


@pytest.mark.parametrize("augment", [*AUGMENTS, *RICH])
@pytest.mark.parametrize("stored", [(3, 5), (40, 30), (1, 50)])
@pytest.mark.parametrize("size", [(16, 24), (1, 1)])
def test_every_size_comes_out(augment, stored, size):
    transform = train_transform(size, ZERO * 3, ONE * 3, augment, 0.9)
    out = transform(photo(*stored))
    assert out.shape == (3, *size)
    assert out.dtype == torch.float32
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("augment", "size", "down", "right"),
    [("shift", (16, 32), 2, 4), ("crop-flip", (16, 32), 2, 4), ("shift", (4, 6), 1, 1)],
)
def test_shift_moves_by_at_most_an_eighth_and_fills_with_zeros(augment, size, down, right):
    """A white pixel in the middle moves to every place within this number of rows and columns, and no further."""
    row, column = size[0] // 2, size[1] // 2
    values = np.zeros(size, np.uint8)
    values[row, column] = 255
    positions = []
    for out in results(train_transform(size, ZERO, ONE, augment), Image.fromarray(values), 150):
        assert out.sum() == 1
        positions.append(out[0].nonzero()[0].tolist())
    columns = set(range(column - right, column + right + 1))
    mirrored = {size[1] - 1 - column for column in columns} if augment == "crop-flip" else set()
    assert {row for row, _ in positions} == set(range(row - down, row + down + 1))
    assert {column for _, column in positions} == columns | mirrored


def test_resized_crop_keeps_the_output_shape_in_mind():
    """Crops for a 2:1 output have ratios between 1.5:1 and 2.67:1, so no crop is distorted by more than 4:3."""
    crop = train_transform((32, 64), ZERO, ONE, "resized-crop").transforms[0]
    assert crop.ratio == pytest.approx((1.5, 8 / 3))
    assert train_transform(32, ZERO, ONE, "resized-crop").transforms[0].ratio == pytest.approx((3 / 4, 4 / 3))


def test_none_is_the_evaluation_transform():
    out = train_transform(9, ZERO * 3, ONE * 3, "none", 0.9)(photo())
    assert torch.equal(out, eval_transform(9, ZERO * 3, ONE * 3, 0.9)(photo()))


@pytest.mark.parametrize("augment", [*AUGMENTS, *RICH])
def test_pickle_and_repr(augment):
    transform = train_transform((8, 6), ZERO * 3, ONE * 3, augment, color_jitter=0.2, random_erasing=0.5)
    again = pickle.loads(pickle.dumps(transform))
    assert repr(again) == repr(transform)
    assert "(8, 6)" in repr(transform)
    assert "0x" not in repr(transform)
    assert torch.equal(*(next(results(one, photo(), 1)) for one in (transform, again)))


def results(transform, image, count):
    """Yield the results of a transform with the seeds 0, 1, ..."""
    for seed in range(count):
        with seeded(seed):
            result = transform(image)
        yield result


def test_deit_is_what_timms_train_script_makes_of_deits_arguments():
    """Policy, operations, magnitudes and erasing are the same as those of timm.data.create_transform."""
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    ours = train_transform((224, 192), mean, std, "deit").transforms
    timms = create_transform(
        (3, 224, 192),
        is_training=True,
        color_jitter=0.3,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.25,
        re_mode="pixel",
        mean=mean,
        std=std,
    ).transforms
    assert [type(step).__name__ for step in ours] == [
        *("RandomResizedCrop", "RandomHorizontalFlip", "RandAugment", "PILToTensor", "ToDtype", "Normalize"),
        "RandomErasing",
    ]
    policy, wanted = ours[2], next(step for step in timms if type(step).__name__ == "RandAugment")
    assert repr(policy).replace(", mmax=9.99", "") == repr(wanted)
    assert [op.hparams for op in policy.ops] == [{**op.hparams, "magnitude_max": 9.99} for op in wanted.ops]
    for op in wanted.ops:
        op.magnitude_max = 9.99  # `test_deit_never_asks_pillow_for_zero_bits` explains this limit.
    for mine, other in zip(results(policy, photo(), 30), results(wanted, photo(), 30), strict=True):
        assert mine.tobytes() == other.tobytes()
    erasing, wanted = ours[-1], timms[-1]
    assert (erasing.p, erasing.scale) == (wanted.probability, (wanted.min_area, wanted.max_area))
    assert [np.log(ratio) for ratio in erasing.ratio] == pytest.approx(list(wanted.log_aspect_ratio))


def test_deit_never_asks_pillow_for_zero_bits():
    """timm's limit, magnitude 10, would give zero bits in about two of a hundred posterize operations."""
    policy = train_transform(32, ZERO * 3, ONE * 3, "deit").transforms[2]
    (posterize,) = (op for op in policy.ops if "Posterize" in op.name)
    posterize.prob = 1.0
    levels = {len(np.unique(np.asarray(out)[..., 0])) for out in results(posterize, photo(), 400)}
    # One or two bits remain, because magnitudes below 7.5 are rare.
    assert levels == {2, 4}


def test_three_augment_takes_one_of_three():
    """Each of greyscale, solarisation from 128 on, and blur is in about a third of the results."""
    image = photo()
    policy = next(s for s in train_transform(32, ZERO * 3, ONE * 3, "three-augment").transforms if "Auto" in repr(s))
    grey = np.asarray(ImageOps.grayscale(image).convert("RGB"))
    values = np.asarray(image)
    solarised = np.where(values < 128, values, 255 - values)
    counts = {"grey": 0, "solarised": 0, "blurred": 0}
    for out in map(np.asarray, results(policy, image, 300)):
        if np.array_equal(out, grey):
            counts["grey"] += 1
        elif np.array_equal(out, solarised):
            counts["solarised"] += 1
        # A blur keeps the mean of each channel and reduces the noise.
        else:
            assert np.abs(out.mean((0, 1)) - values.mean((0, 1))).max() < 3
            assert (out.std((0, 1)) <= values.std((0, 1))).all()
            counts["blurred"] += 1
    assert min(counts.values()) > 70


def test_three_augment_crop_is_a_small_shift_with_mirrored_border():
    steps = train_transform((16, 24), ZERO * 3, ONE * 3, "three-augment-crop").transforms
    place = v2.Compose(steps[:3])
    values = np.arange(16 * 24).reshape(16, 24) % 251
    image = Image.fromarray(values.astype(np.uint8))
    padded = np.pad(values, 4, mode="reflect")
    possible = {}
    for row in range(9):
        for column in range(9):
            part = padded[row : row + 16, column : column + 24]
            possible[part.astype(np.uint8).tobytes()] = (row, column)
            possible[part[:, ::-1].astype(np.uint8).tobytes()] = (row, column)
    seen = {possible[out.tobytes()] for out in results(place, image, 150)}
    assert {row for row, _ in seen} == {column for _, column in seen} == set(range(9))


@pytest.mark.parametrize("augment", ["none", "deit", "three-augment"])
def test_colour_jitter_is_honoured(augment):
    """The mean of a grey image is multiplied by factors from 1 - x to 1 + x; with 0 it stays the same."""
    image = Image.new("RGB", (24, 24), (100, 100, 100))

    def brightness(color_jitter):
        steps = train_transform((16, 24), ZERO * 3, ONE * 3, augment, 1.0, color_jitter, 0.0).transforms
        steps = [step for step in steps if "Augment" not in type(step).__name__ and "Crop" not in type(step).__name__]
        return [float(out.mean() * 255) for out in results(v2.Compose(steps), image, 60)]

    assert brightness(0.0) == pytest.approx([100] * 60, abs=1e-3)
    values = brightness(0.4)
    assert 59 <= min(values) < 70
    assert 130 < max(values) <= 141
    # By default only 'three-augment' has colour jitter.
    assert (max(brightness(None)) > 120) == (augment == "three-augment")


def test_random_erasing_is_honoured():
    """White pixels become 5. Erasing replaces 2 to 33 % of the area by noise in a share p of the images."""
    image = Image.new("RGB", (40, 30), (255, 255, 255))

    def changes(random_erasing, count):
        transform = train_transform((30, 40), (0.0,) * 3, (0.2,) * 3, "none", 1.0, 0.0, random_erasing)
        changed = [out - 5 for out in results(transform, image, count)]
        return [out[:, out.abs().amax(0) > 1e-3] for out in changed if out.abs().max() > 1e-3]

    assert changes(None, 30) == changes(0.0, 30) == []
    assert 35 < len(changes(0.5, 100)) < 65
    erased = changes(1.0, 100)
    assert len(erased) == 100
    # The sides of rectangles are rounded to pixels.
    assert all(0.015 < noise.shape[1] / (30 * 40) < 0.36 for noise in erased)
    noise = torch.cat(erased, 1) + 5
    assert abs(noise.mean()) < 0.05
    assert noise.std() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"color_jitter": -0.1}, "color_jitter must be 0 or more, got -0.1"),
        ({"random_erasing": 1.5}, "random_erasing must be in 0 <= x <= 1"),
        ({"augment": "none", "crop_pct": 1.01}, "crop_pct must be in 0 < x <= 1"),
        ({"augment": "none", "crop_pct": 0.001}, "crop_pct 0.001 resizes images to 8,000 pixels .*: give 0.1 to 1"),
        ({"augment": "crop_flip"}, r"'crop_flip'; allowed are 'none', 'shift', .*did you mean 'crop-flip'"),
        ({"augment": "three-augment-crop"}, "for images of three channels, and these have 1; use 'crop-flip'"),
        ({"std": (1.0, 1.0)}, "give one of each per channel"),
        ({"mean": (), "std": ()}, "give one of each per channel"),
        ({"std": (0.0,)}, "std greater than zero"),
        ({"mean": (123.7,)}, r"mean is \(123.7,\) .* for images with values from 0 to 1: mean from 0 to 1"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        train_transform(8, **{"mean": ZERO, "std": ONE, "augment": "shift"} | arguments)


@pytest.mark.parametrize(("augment", "count"), [("none", 1), ("shift", 35), ("crop-flip", 70)])
def test_a_batch_has_what_image_by_image_can_have(augment, count):
    """The batch transform can give all results of the single transform: 5 x 7 shifts, mirrored with 'crop-flip'."""
    mean, std = (0.2, 0.4, 0.6), (0.5, 0.3, 0.1)
    values = np.random.default_rng(0).integers(0, 256, (16, 24, 3)).astype(np.uint8)
    single = train_transform((16, 24), mean, std, augment)
    torch.manual_seed(0)
    possible = [single(Image.fromarray(values)) for _ in range(10 * count)]
    batch = BatchTransform.like(single, (16, 24))(torch.from_numpy(values).expand(10 * count, -1, -1, -1))
    assert (batch.dtype, batch.is_contiguous()) == (torch.float32, True)
    as_keys = [{tuple(out[0].flatten().mul(1e3).round().int().tolist()) for out in outs} for outs in (batch, possible)]
    assert as_keys[0] == as_keys[1]
    assert len(as_keys[0]) == count
    if augment == "none":
        torch.testing.assert_close(batch[0], possible[0])


@pytest.mark.parametrize(
    "steps",
    [
        [v2.CenterCrop(8), v2.RandomCrop(4)],
        [v2.CenterCrop(20)],
        [v2.RandomHorizontalFlip(), v2.RandomCrop(8)],
        [v2.Resize(8), v2.CenterCrop(8)],
        [v2.Resize((8, 8))],
        [v2.RandomCrop(8, padding=(1, 0, 2, 0))],
        [v2.RandomCrop(8, padding=1, fill=9)],
        [v2.RandomVerticalFlip()],
    ],
    ids=str,
)
def test_other_transforms_have_no_form_for_batches(steps):
    channels = ((0.5,) * 3, (0.5,) * 3)
    last = eval_transform(8, *channels).transforms[2:]
    assert BatchTransform.like(v2.Compose([*steps, *last]), (16, 24)) is None
    assert BatchTransform.like(v2.Compose(steps), (16, 24)) is None
    assert BatchTransform.like(v2.Compose([v2.RandomCrop((8, 6)), *last]), (16, 24)).size == (8, 6)
