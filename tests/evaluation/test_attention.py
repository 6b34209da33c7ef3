"""`clf.attention`: of one image of any kind, at any size."""

import numpy as np
import pytest
import torch
from PIL import Image

import relvit
from relvit.data import UnreadableImageError


@pytest.fixture(scope="module")
def best(run):
    return run / "checkpoints" / "best.ckpt"


@pytest.mark.parametrize("img_size", [None, (24, 40)])
def test_one_image_of_any_kind(best, photos, img_size):
    clf = relvit.load(best, img_size)
    path = photos / "test" / "owl" / "0.jpg"
    image = Image.open(path)
    pixels = clf.transform(image)[None]
    expected = relvit.attention_maps(clf.model, pixels)
    rows, cols = clf.img_size[0] // 8, clf.img_size[1] // 8
    for given in (path, str(path), image, np.asarray(image), torch.from_numpy(np.array(image)).permute(2, 0, 1)):
        maps = clf.attention(given)
        assert (maps.grid, maps.prefix, len(maps.weights)) == ((rows, cols), 0, 2)
        for weights, want in zip(maps.weights, expected.weights, strict=True):
            assert weights.dtype == torch.float32
            assert weights.shape == (2, rows * cols, rows * cols)
            torch.testing.assert_close(weights, want[0])
    (last,) = clf.attention(path, layers=[-1]).weights
    torch.testing.assert_close(last, maps.weights[1])
    assert clf.predict(path).probabilities == relvit.load(best, img_size).predict(path).probabilities


def test_refused(best, photos, tmp_path):
    clf = relvit.load(best)
    with pytest.raises(TypeError, match="attention takes one image, got 6 of them: give one after the other"):
        clf.attention(photos / "test" / "owl")
    with pytest.raises(TypeError, match="one image, got 1 of them"):
        clf.attention([photos / "test" / "owl" / "0.jpg"])
    (tmp_path / "broken.jpg").write_bytes(b"nothing")
    with pytest.raises(UnreadableImageError, match=r"broken\.jpg"):
        clf.attention(tmp_path / "broken.jpg")
