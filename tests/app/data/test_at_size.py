"""Copies of a data module at another size: they have the same images, and the module itself does not change."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from relvit.app.data import DigitsData, ImageFolderData, eval_transform
from relvit.app.data.at_size import at_size
from relvit.app.data.images.decode import load_rgb


def images_of(loader):
    return torch.cat([images for images, _ in loader])


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("cache", [False, True])
def test_images_of_a_training_that_goes_on(photos, split, cache):
    data = ImageFolderData(str(photos), img_size=16, batch_size=5, num_workers=0, augment="resized-crop", cache=cache)
    data.dataset("train")
    before = images_of(data.val_dataloader())
    own = at_size(data, (24, 32), split, "field", "grey")
    files = data.samples(split)
    transform = eval_transform((24, 32), data.mean, data.std, 0.9, "field", 16, "grey")
    expected = torch.stack([transform(load_rgb(path)) for path, _ in files])
    torch.testing.assert_close(images_of(own.test_dataloader()), expected)
    labels = torch.cat([labels for _, labels in own.test_dataloader()])
    assert labels.tolist() == [label for _, label in files]
    assert data.img_size == (16, 16)
    assert torch.equal(images_of(data.val_dataloader()), before)
    assert data.trains_on("train")
    assert any(isinstance(step, v2.RandomResizedCrop) for step in data.dataset("train").transform.transforms)


def test_files_are_looked_for_once(photos, monkeypatch):
    data = ImageFolderData(str(photos), img_size=16, num_workers=0)
    at_size(data, 24, "val")
    monkeypatch.setattr(ImageFolderData, "build", None)
    assert len(at_size(data, 32, "val").test_dataloader().dataset) == 18


def test_native_images_get_one_size(photos):
    options = {"img_size": 16, "num_workers": 0, "batch_size": 18}
    native = ImageFolderData(str(photos), native=True, patch_size=8, max_tokens=4, **options)
    (images, _), (same, _) = (
        next(iter(at_size(data, (24, 32)).test_dataloader()))
        for data in (native, ImageFolderData(str(photos), **options))
    )
    assert torch.equal(images, same)
    assert isinstance(next(iter(native.test_dataloader()))[0], dict)


def test_what_there_is_not(photos, tmp_path):
    (tmp_path / "train").symlink_to(photos / "train")
    with pytest.raises(ValueError, match="no test folder"):
        at_size(ImageFolderData(str(tmp_path)), 24)
    digits = DigitsData()
    assert np.shape(at_size(digits, 12, "train", "resize").dataset("train")[0][0]) == (1, 12, 12)
    assert digits._datasets == {}
