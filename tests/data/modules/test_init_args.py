"""Arguments of data modules in a checkpoint: after a way through JSON they build the same module."""

import json

import pytest
from grey_folders import make
from small_training import NoiseImages

from relvit.data import CIFAR100Data, DigitsData, ImageFolderData, ImageListData

DEFAULT = {"img_size": (10, 8), "batch_size": 3, "augment": "none", "crop_pct": 0.8, "repeats": 2}
FILES = DEFAULT | {"split_seed": 5, "on_error": "skip", "balance": "loss"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DigitsData, DEFAULT),
        (CIFAR100Data, DEFAULT | {"root": "cifar"}),
        (ImageFolderData, FILES | {"root": "photos", "class_names": ["cat", "bee", "ant"]}),
        (ImageListData, FILES | {"train": "photos/list.csv", "label_separator": ";", "balance": "none"}),
    ],
)
def test_init_args_through_json(kind, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "photos", train=9)
    rows = [f"train/{name}/{number:03d}.png,{name}" for name in ("ant", "cat") for number in range(9)]
    (tmp_path / "photos" / "list.csv").write_text("\n".join(["path,label", *rows]))
    data = kind(**options)
    arguments = json.loads(json.dumps(data.init_args()))
    monkeypatch.chdir(tmp_path.parent)
    again = kind(**arguments)
    assert again.init_args() == data.init_args()
    assert (again.img_size, again.crop_pct, again.batch_size, again.repeats) == ((10, 8), 0.8, 3, 2)
    assert (again.class_names, again.mean) == (data.class_names, data.mean)
    if kind is not CIFAR100Data:
        assert list(again.manifest("val")) == list(data.manifest("val")) != []


def test_a_data_module_without_statistics_needs_mean_and_std():
    with pytest.raises(ValueError, match=r"mean is \(\); the images have 3 channels, give 3 numbers"):
        NoiseImages(3, mean=None)
    with pytest.raises(ValueError, match=r"std \(\); give one of each per channel"):
        NoiseImages(3, std=None)
