"""`relvit.load` opens checkpoints of `ImageClassifier`, whatever Trainer and data it was trained with."""

import warnings

import lightning
import pytest
import torch
from command_line import evaluate, rows
from PIL import Image
from small_training import NAMES, Noise, NoiseImages, SeveralLabels, build

import relvit
from relvit.app.training import Checkpoint


class Described(Noise):
    """A data module of Lightning that has attributes for the transforms of its images."""

    class_names = NAMES[::-1]
    mean, std, crop_pct = torch.tensor([0.1, 0.2, 0.3]), (0.4, 0.5, 0.6), 0.8


def fitted(tmp_path, data, module, **loaders):
    """Train with Lightning's own Trainer, and return the path of the checkpoint that its own callback has saved."""
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, logger=False, enable_progress_bar=False
    )
    trainer.fit(module, datamodule=data, **loaders)
    return trainer.checkpoint_callback.best_model_path


def test_loaders_of_ones_own(tmp_path):
    module = build(ema_decay=0.5, class_names=NAMES)
    loader = Noise().train_dataloader()
    path = fitted(tmp_path, None, module, train_dataloaders=loader, val_dataloaders=loader)
    with pytest.warns(UserWarning, match=r"not relvit's.* mean \[0.485, .*crop_pct .* set `transform`"):
        found = relvit.load(path)
    assert (found.class_names, found.img_size, found.mean) == (NAMES, (8, 12), (0.485, 0.456, 0.406))
    images = next(iter(loader))[0]
    torch.testing.assert_close(found.model(images), module.average.net(images), atol=0, rtol=0)
    assert found.predict(Image.new("RGB", (30, 20))).name in NAMES
    with pytest.raises(ValueError, match=r"was trained on datasets in Python, .* class folders by --root DIR"):
        Checkpoint.read(path).data_module()
    for number in range(7):
        (tmp_path / "photos" / f"class {number}").mkdir(parents=True)
    assert Checkpoint.read(path).data_module(root=str(tmp_path / "photos")).class_names == NAMES


def test_classes_without_names_have_their_numbers(tmp_path):
    loader = Noise().train_dataloader()
    path = fitted(tmp_path, None, build(), train_dataloaders=loader)
    with pytest.warns(UserWarning, match="loaders"):
        found = relvit.load(path)
    assert found.class_names == list("0123456")
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    with pytest.warns(UserWarning, match=r"std \[0.229, .*, crop_pct .* give --data.mean, --data.std, --data.crop_pct"):
        folder = evaluate("predict", path, tmp_path / "runs", tmp_path / "a.png")
    (row,) = rows(folder / "predictions.csv")
    assert row["class"] == found.predict(tmp_path / "a.png").name


def test_a_data_module_of_lightning(tmp_path):
    path = fitted(tmp_path, Described(), build())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = relvit.load(path)
    assert (found.class_names, found.crop_pct, found.std) == (NAMES[::-1], 0.8, (0.4, 0.5, 0.6))
    assert found.mean == pytest.approx((0.1, 0.2, 0.3))


def test_the_names_of_the_data_are_kept_where_the_classifier_has_none(tmp_path):
    """Without the names, the data of an evaluation could have other classes, or the same ones in another order."""
    checkpoint = Checkpoint.read(fitted(tmp_path, NoiseImages(8), build(warmup_epochs=0)))
    assert checkpoint.model["class_names"] == NAMES
    other = NoiseImages(8)
    other.class_names = NAMES[::-1]
    with pytest.raises(ValueError, match="other classes than the data has: their order is another"):
        checkpoint.check_data(other)


@pytest.mark.parametrize("data", [NoiseImages(8), SeveralLabels(8, crop_pct=0.7)], ids=["one", "several"])
def test_a_data_module_of_relvit(data, tmp_path):
    """The checkpoint also has the attributes that the class sets itself and that are no arguments."""
    path = fitted(tmp_path, data, build(class_names=NAMES, multi_label=data.multi_label, warmup_epochs=0))
    checkpoint = Checkpoint.read(path)
    assert checkpoint.class_names() == NAMES
    assert checkpoint.transforms() == ((8, 12), (0.5,) * 3, (0.5,) * 3, data.crop_pct)
    again = checkpoint.data_module(batch_size=3)
    assert (type(again), again.count, again.batch_size, again.crop_pct) == (type(data), 8, 3, data.crop_pct)
    assert relvit.load(path).thresholds == (list(checkpoint.thresholds) if data.multi_label else None)
