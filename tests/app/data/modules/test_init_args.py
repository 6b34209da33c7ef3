"""The arguments of a data module in a checkpoint, converted to JSON and back, build the same module."""

import copy
import json
from enum import Enum, StrEnum
from pathlib import Path

import pytest
from grey_folders import make
from small_training import NoiseImages

from relvit.app.data import CIFAR100Data, DigitsData, ImageData, ImageFolderData, ImageListData

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


def test_a_data_module_without_statistics_has_those_of_imagenet():
    data = NoiseImages(3, mean=None, std=None)
    assert (data.mean, data.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert data.unset_statistics == ["mean", "std"]
    assert NoiseImages(3, mean=None).unset_statistics == ["mean"]
    assert (Grey().mean, Grey().std, Grey().img_size, Grey().class_names) == ((0.5,), (0.5,), (224, 224), ["a", "b"])


class Grey(NoiseImages):
    """This class passes names by keyword and leaves out all other arguments."""

    def __init__(self):
        ImageData.__init__(self, class_names=["a", "b"], in_chans=1)


class Own(NoiseImages):
    """A user's class: narrower types, a path and a number that change, and a value that JSON cannot hold."""

    def __init__(
        self,
        root,
        img_size: int = 16,
        crop_pct: str = "most",
        source=None,
        *,
        fold=1,
        names: list | None = None,
        **rest,
    ):
        self.root = str(Path(root).absolute())
        self.fold = fold - 1
        super().__init__(3, img_size=img_size, crop_pct={"most": 0.9}[crop_pct], **rest)


def test_arguments_of_a_users_class_are_those_that_it_was_given(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    data = Own(Path("photos"), source=object(), fold=3, batch_size=5, train_sizes=[16, 24])
    expected = {"root": f"{tmp_path}/photos", "img_size": 16, "crop_pct": "most", "fold": 3, "names": None}
    assert data.init_args() == expected | {"batch_size": 5, "train_sizes": [16, 24]}
    again = Own(**json.loads(json.dumps(data.init_args())))
    assert (again.init_args(), again.train_sizes) == (data.init_args() | {"source": None}, data.train_sizes)
    assert again.fold == data.fold
    copied = copy.copy(data)
    assert copied.init_args() == data.init_args()


class Side(Enum):
    LEFT = 1
    RIGHT = 2


class Colour(StrEnum):
    RED = "r"
    BLUE = "b"


class OfEnums(NoiseImages):
    """A user's class with members of enums, which its signature names, or not, and dictionaries of any values."""

    def __init__(self, side: Side, colour: Colour | None = None, other=None, folds=None, sources=None):
        self.side, self.colour, self.other = side, colour, other
        super().__init__(3)


def test_arguments_are_recorded_whole_or_not_at_all():
    folds = {"a": {"b": [1, Path("c")]}}
    data = OfEnums(Side.RIGHT, Colour.BLUE, Colour.BLUE, folds, {"a": 1, "b": {"c": object()}})
    recorded = json.loads(json.dumps(data.init_args()))
    assert recorded == {"side": "RIGHT", "colour": "BLUE", "folds": {"a": {"b": [1, "c"]}}}
    again = OfEnums(**recorded)
    assert (again.side, again.colour, again.init_args()["side"]) == (Side.RIGHT, Colour.BLUE, "RIGHT")
