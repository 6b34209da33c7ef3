"""The sheet of training images: its pictures, and that a training gives the same results with and without the sheet."""

import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_training import KWARGS, record_steps, train

from relvit.app.data import CIFAR10Data, ImageFolderData
from relvit.app.data.images.image_cache import StackedImages
from relvit.app.training import ImageClassifier, TrainingImages
from relvit.app.training.callbacks import training_images


@pytest.fixture
def sheets(monkeypatch):
    """Record the arguments of each sheet instead of drawing it."""
    drawn = []
    monkeypatch.setattr(training_images, "plot_sheet", lambda *arguments, **options: drawn.append(arguments))
    return drawn


def fit_of(data):
    """Return stand-ins for the trainer and the module that a callback gets."""
    return SimpleNamespace(datamodule=data, is_global_zero=True), SimpleNamespace(mixing=None)


def test_shows_the_first_images_as_the_model_sees_them(photos, tmp_path, sheets):
    """The sheet shows each image as it was augmented, with its class; random states do not change."""
    seen, states = [], []

    class Watch(TrainingImages):
        def on_fit_start(self, trainer, pl_module):
            for _ in range(2):
                states.append((random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()))
                super().on_fit_start(trainer, pl_module)

    data = ImageFolderData(str(photos), img_size=16, batch_size=8, num_workers=1, augment="crop-flip")
    module = ImageClassifier("test_relvit", 3, 3, (16, 16), data.class_names, KWARGS)
    record_steps(module, lambda batch, _: seen.extend(zip(*batch, strict=True)))
    train(module, data, max_epochs=1, callbacks=[Watch(tmp_path / "sheet.png")])
    (pictures, names, path), _ = sheets
    assert path == tmp_path / "sheet.png"
    assert len(seen) == len(pictures) == 18
    assert states[0] == states[1]
    assert data.num_workers == 1
    mean, std = (torch.tensor(values)[:, None, None] for values in (data.mean, data.std))
    for (image, label), picture, name in zip(seen, pictures, names, strict=True):
        pixels = (255 * (image * std + mean)).round().permute(1, 2, 0).numpy()
        assert np.array_equal(picture, pixels)
        assert name == data.class_names[label]


def test_images_that_cannot_be_read_or_drawn_end_nothing(photos, tmp_path, monkeypatch, capsys):
    root = shutil.copytree(photos, tmp_path / "photos")
    for path in (root / "train" / "cat").iterdir():
        path.write_bytes(b"no image")
    data = ImageFolderData(str(root), img_size=16, num_workers=0, on_error="skip")
    TrainingImages(tmp_path / "skip.png").on_fit_start(*fit_of(data))
    assert (tmp_path / "skip.png").is_file()

    def broken(*arguments, **options):
        raise RuntimeError("no\nfont")

    monkeypatch.setattr(training_images, "plot_sheet", broken)
    TrainingImages(tmp_path / "broken.png").on_fit_start(*fit_of(data))
    assert "Note: broken.png could not be drawn: no font\n" in capsys.readouterr().out


def test_twenty_of_a_batch_of_images_in_memory(tmp_path, sheets, monkeypatch):
    """CIFAR's images are augmented as a batch; noise stands in for the images."""
    data = CIFAR10Data(num_workers=0, batch_size=16)
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), np.uint8))
    noise = StackedImages(pixels, [i % 10 for i in range(40)], data.train_transform)
    monkeypatch.setattr(data, "missing", lambda split: None)
    monkeypatch.setattr(data, "build", lambda split: noise)
    TrainingImages(tmp_path / "sheet.png").on_fit_start(*fit_of(data))
    ((pictures, names, _),) = sheets
    assert len(pictures) == len(names) == 20
    assert all(picture.shape == (32, 32, 3) for picture in pictures)
