"""The sheet of training images: what it shows, and that the training goes on as without."""

import random
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from photos import TINY
from small_training import KWARGS, assert_close, record_steps, train

from relvit.cli import main
from relvit.data import CIFAR10Data, ImageFolderData
from relvit.data.images.memory import StackedImages
from relvit.plots import read_metrics
from relvit.training import ImageClassifier, TrainingImages
from relvit.training.callbacks import training_images


@pytest.fixture
def sheets(monkeypatch):
    """What would be drawn."""
    drawn = []
    monkeypatch.setattr(training_images, "plot_sheet", lambda *arguments, **options: drawn.append(arguments))
    return drawn


def test_shows_the_first_images_as_the_model_sees_them(photos, tmp_path, sheets):
    """Every one, with its class, and with whatever the augmentation has drawn for it; random numbers stay."""
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


def test_a_training_is_the_same_with_and_without(run, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingImages, "on_fit_start", lambda *arguments: None)
    assert main(["fit", f"--config={run / 'config.yaml'}", f"--runs={tmp_path}"]) == 0
    (without,) = tmp_path.iterdir()
    assert (run / "training_images.png").is_file()
    assert not (without / "training_images.png").exists()
    assert_close(
        *(torch.load(f / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for f in (run, without))
    )
    for name in ("train/loss", "val/loss"):
        assert read_metrics(run / "metrics.csv")[name] == read_metrics(without / "metrics.csv")[name]


def test_images_that_cannot_be_read_or_drawn_end_nothing(photos, tmp_path, monkeypatch, capsys):
    root = shutil.copytree(photos, tmp_path / "photos")
    for path in (root / "train" / "cat").iterdir():
        path.write_bytes(b"no image")
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={root}", *TINY, "--trainer.max_epochs=1"]
    assert main([*arguments, "--data.on_error=skip", f"--runs={tmp_path / 'skip'}"]) == 0
    assert len(list((tmp_path / "skip").glob("*/training_images.png"))) == 1

    def broken(*arguments, **options):
        raise RuntimeError("no\nfont")

    monkeypatch.setattr(training_images, "plot_sheet", broken)
    assert main([*arguments, "--data.on_error=skip", f"--runs={tmp_path / 'broken'}"]) == 0
    assert "Note: training_images.png could not be drawn: no font\n" in capsys.readouterr().out


def test_twenty_of_a_batch_of_images_in_memory(tmp_path, sheets):
    """CIFAR's come augmented as a batch; here they are noise."""
    data = CIFAR10Data(num_workers=0, batch_size=16)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), np.uint8)
    data._datasets["train"] = StackedImages(torch.from_numpy(pixels), [i % 10 for i in range(40)], data.train_transform)
    trainer, module = SimpleNamespace(datamodule=data, is_global_zero=True), SimpleNamespace(mixing=None)
    TrainingImages(tmp_path / "sheet.png").on_fit_start(trainer, module)
    ((pictures, names, _),) = sheets
    assert len(pictures) == len(names) == 20
    assert all(picture.shape == (32, 32, 3) for picture in pictures)
