"""Broken and odd images and folders have the results listed in tests/support/data/broken_input.py and in the docs."""

import os
import re
import signal
import warnings

import numpy as np
import pytest
from broken_input import BEGIN, DOCUMENT, END, FOLDERS, IMAGES, WARNED, table
from grey_folders import data_of, make
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from relvit.app.data import UnreadableImageError, eval_transform, load_rgb
from relvit.app.data.images.decode import IMAGE_ENDINGS
from relvit.app.data.images.folders import image_files, walk_once


@pytest.fixture(autouse=True)
def _no_hanging():
    """Interrupt a test that hangs, as opening a pipe would."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("hangs"))
    signal.alarm(60)
    yield
    signal.alarm(0)


@pytest.mark.parametrize("case", IMAGES, ids=lambda case: case.kind)
def test_images(case, tmp_path):
    path = case.write(tmp_path)
    if case.kind == "no right to read it" and os.access(path, os.R_OK):
        pytest.skip("an administrator may read every file, so none is unreadable")
    if case.reason:
        with pytest.raises(UnreadableImageError, match=re.escape(case.reason)) as caught:
            load_rgb(path)
        assert (caught.value.path, len(str(caught.value).splitlines())) == (str(path), 1)
        assert str(caught.value).startswith(f"cannot read image {path}: ")
        return
    image = load_rgb(str(path))
    assert type(image) is Image.Image  # The image is detached from its file.
    assert (image.mode, image.size) == ("RGB", case.size)
    # A GIF has a palette, which rounds the colours.
    assert np.abs(np.subtract(image.getpixel((0, 0)), case.pixel)).max() <= (1 if path.suffix == ".gif" else 0)
    values = eval_transform(8, (0.0,) * 3, (1.0,) * 3)(image)
    assert values.shape == (3, 8, 8)


def test_a_long_image_keeps_its_middle():
    """The middle is white, and the ends are black."""
    stripe = np.zeros((1, 30_000, 3), np.uint8)
    stripe[:, 14_000:16_000] = 255
    assert eval_transform(8, (0.0,) * 3, (1.0,) * 3)(Image.fromarray(stripe)).min() == 1


@pytest.mark.parametrize("case", FOLDERS, ids=lambda case: case.kind)
def test_folders(case, tmp_path):
    root = make(tmp_path / "photos", train=2, val=1)
    case.spoil(tmp_path / "photos")
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        if case.counts is None:
            with pytest.raises((ValueError, FileNotFoundError), match=re.escape(case.message)) as caught:
                data_of(root).setup("fit")
            assert len(str(caught.value).splitlines()) == 1
            return
        data = data_of(root)
        train = data.dataset("train")
    assert tuple(np.bincount(train.targets)) == case.counts
    paths = [path for path, _ in train.samples]
    assert len({os.path.realpath(path) for path in paths}) == len(paths)
    messages = [str(warning.message) for warning in caught_warnings]
    assert (case.outcome == WARNED) == any(case.message in message for message in messages if case.message)
    assert case.outcome == WARNED or messages == []


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError, match="closed"):
        list(walk_once(str(tmp_path)))


def test_every_ending_is_read_and_documented(tmp_path):
    text = DOCUMENT.read_text()
    assert set(IMAGE_ENDINGS) >= set(IMG_EXTENSIONS)  # These are the endings that torchvision reads.
    for ending in IMAGE_ENDINGS:
        assert f"`{ending}`" in text
        mode = {".pbm": "1", ".pgm": "L"}.get(ending, "RGB")
        (tmp_path / ending).mkdir()
        Image.new("RGB", (8, 8), (255,) * 3).convert(mode).save(tmp_path / ending / f"a{ending.upper()}")
        (path,) = image_files(str(tmp_path / ending))
        assert load_rgb(path).getpixel((4, 4)) == (255,) * 3


def test_the_document_holds_the_list():
    written = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0].strip()
    assert written == table(), "run python tests/support/data/broken_input.py"
    assert len(IMAGES) + len(FOLDERS) >= 25
