"""Values and places, not only shapes, of the transforms."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from relvit.data import eval_transform, parse_size, train_transform
from relvit.data.transforms import ResizeToCover

ZERO, ONE = (0.0,), (1.0,)
AUGMENTS = ["none", "shift", "crop-flip", "resized-crop"]


def ramp(height, width, axis):
    """A grey image whose value grows by one per pixel along rows (0) or columns (1)."""
    return Image.fromarray(np.indices((height, width))[axis].astype(np.uint8))


def test_parse_size():
    assert parse_size(8) == (8, 8)
    assert parse_size([6, 4]) == (6, 4)
    assert parse_size((6, 4)) == (6, 4)


@pytest.mark.parametrize("wrong", [0, -1, True, (8,), (8, 8, 3), (8, 0), (8.0, 8), "88", None, 8.0])
def test_parse_size_refuses(wrong):
    with pytest.raises(ValueError, match=r"img_size is .*give a positive integer"):
        parse_size(wrong)


def test_normalised_values():
    image = Image.new("RGB", (4, 4), (255, 51, 0))
    out = eval_transform(4, (0.5, 0.2, 0.1), (0.5, 0.1, 0.2))(image)
    assert out.dtype == torch.float32
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([1.0, 0.0, -0.5]))


def test_centre_crop_of_non_square_sizes_keeps_rows_and_columns_apart():
    rows = eval_transform((2, 4), ZERO, ONE)(ramp(4, 4, 0)) * 255
    columns = eval_transform((2, 4), ZERO, ONE)(ramp(4, 4, 1)) * 255
    torch.testing.assert_close(rows, torch.tensor([1.0, 2.0])[None, :, None].expand(1, 2, 4))
    torch.testing.assert_close(columns, torch.tensor([0.0, 1.0, 2.0, 3.0])[None, None].expand(1, 2, 4))


def test_crop_pct():
    image = ramp(10, 20, 1)
    out = eval_transform(9, ZERO, ONE, crop_pct=0.9)(image) * 255  # covers 10 x 10 as it is: no resize
    assert out.shape == (1, 9, 9)
    assert out[0, 0].tolist() == pytest.approx(list(range(6, 15)), abs=1e-4)
    covered = eval_transform(63, ZERO, ONE, crop_pct=0.9).transforms[0].size
    assert covered == (70, 70)


@pytest.mark.parametrize("crop_pct", [0, -0.5, 1.01])
def test_crop_pct_refuses(crop_pct):
    with pytest.raises(ValueError, match="crop_pct"):
        eval_transform(8, ZERO, ONE, crop_pct)


@pytest.mark.parametrize(
    ("stored", "size", "expected"),
    [
        ((10, 20), (5, 5), (5, 10)),
        ((3, 7), (6, 6), (6, 14)),
        ((100, 33), (64, 48), (145, 48)),
        ((5, 5), (5, 3), (5, 5)),
    ],
)
def test_resize_to_cover(stored, size, expected):
    out = ResizeToCover(size)(ramp(*stored, 0))
    assert (out.height, out.width) == expected


def test_resize_is_antialiased():
    stripes = Image.fromarray((np.indices((64, 64))[1] % 2 * 255).astype(np.uint8))
    out = eval_transform(16, ZERO, ONE)(stripes)
    assert (out - 0.5).abs().max() < 0.1  # without antialiasing whole stripes would be picked


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("stored", [(3, 5), (40, 30), (16, 24), (1, 50)])
@pytest.mark.parametrize("size", [(16, 24), (1, 1), (9, 4)])
def test_every_size_comes_out(augment, stored, size):
    transform = train_transform(size, ZERO * 3, ONE * 3, augment, 0.9)
    out = transform(ramp(*stored, 0).convert("RGB"))
    assert out.shape == (3, *size)
    assert out.dtype == torch.float32
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("augment", ["shift", "crop-flip"])
def test_shift_moves_by_at_most_an_eighth_and_fills_with_zeros(augment):
    """One white pixel in the middle of 16 x 32: seen at every shift of 2 rows and 4 columns, and nowhere else."""
    values = np.zeros((16, 32), np.uint8)
    values[8, 16] = 255
    transform = train_transform((16, 32), ZERO, ONE, augment)
    torch.manual_seed(0)
    places = set()
    for _ in range(2000):
        out = transform(Image.fromarray(values))[0]
        assert out.sum() == 1
        places.add(tuple(out.nonzero()[0].tolist()))
    columns = set(range(12, 21)) | ({31 - c for c in range(12, 21)} if augment == "crop-flip" else set())
    assert {row for row, _ in places} == set(range(6, 11))
    assert {column for _, column in places} == columns


def test_shift_of_tiny_images_is_one_pixel():
    values = np.zeros((4, 4), np.uint8)
    values[1, 2] = 255
    transform = train_transform(4, ZERO, ONE, "shift")
    torch.manual_seed(0)
    places = {tuple(transform(Image.fromarray(values))[0].nonzero()[0].tolist()) for _ in range(300)}
    assert places == {(row, column) for row in (0, 1, 2) for column in (1, 2, 3)}


def test_resized_crop_keeps_the_output_shape_in_mind():
    """Crops of a 2:1 output are taken between 1.5:1 and 2.67:1, so that nothing is distorted more than by 4:3."""
    crop = train_transform((32, 64), ZERO, ONE, "resized-crop").transforms[0]
    assert crop.ratio == pytest.approx((1.5, 8 / 3))
    assert train_transform(32, ZERO, ONE, "resized-crop").transforms[0].ratio == pytest.approx((3 / 4, 4 / 3))


def test_none_is_the_evaluation_transform():
    image = ramp(20, 30, 1)
    out = train_transform(9, ZERO, ONE, "none", 0.9)(image)
    torch.testing.assert_close(out, eval_transform(9, ZERO, ONE, 0.9)(image), rtol=0, atol=0)


def test_unknown_augment_names_the_nearest():
    with pytest.raises(ValueError, match=r"'crop_flip'; allowed are 'none', 'shift', .*did you mean 'crop-flip'"):
        train_transform(8, ZERO, ONE, "crop_flip")


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (1.0, 1.0)), ((), ()), ((0.5,), (0.0,))])
def test_mean_and_std_must_fit(mean, std):
    with pytest.raises(ValueError, match="per channel"):
        eval_transform(8, mean, std)


@pytest.mark.parametrize("augment", AUGMENTS)
def test_pickle_and_repr(augment):
    transform = train_transform((8, 6), ZERO, ONE, augment)
    again = pickle.loads(pickle.dumps(transform))
    assert repr(again) == repr(transform)
    assert "(8, 6)" in repr(transform)
    assert "0x" not in repr(transform)
    results = []
    for one in (transform, again):
        torch.manual_seed(3)
        results.append(one(ramp(12, 12, 1)))
    torch.testing.assert_close(*results, rtol=0, atol=0)
