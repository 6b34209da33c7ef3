"""ImageFolderData: classes by name, the random split, every layout of folders."""

import os
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from grey_folders import GREY, add, data_of, fits, make

from relvit.app.data import ImageFolderData
from relvit.app.data.modules.image_folder import _holds_classes
from relvit.app.training import new_run_folder


def paths(dataset):
    return [path for path, _ in dataset.samples]


def test_defaults(tmp_path, monkeypatch):
    """The constructor reads no files."""
    monkeypatch.setattr("relvit.app.data.images.folders.os.walk", lambda *_, **__: pytest.fail("walked"))
    data = ImageFolderData(make(tmp_path, train=2))
    assert (data.class_names, data.num_classes, data.in_chans) == (["ant", "bee", "cat"], 3, 3)
    assert (data.img_size, data.augment, data.crop_pct, data.num_workers) == ((224, 224), "resized-crop", 0.9, 2)
    assert not data.has_test


def test_classes_are_matched_by_name_where_val_lacks_one(tmp_path):
    data = data_of(make(tmp_path, train=2, val={"bee": 2, "cat": 1}, test={"cat": 3}))
    data.setup()
    assert [fits(data.dataset(split)) for split in ("val", "test")] == [[1, 1, 2], [2, 2, 2]]


def test_classes_of_a_checkpoint_in_another_order(tmp_path):
    order = ["cat", "ant", "bee"]
    data = data_of(make(tmp_path, train=2, val={"bee": 1, "ant": 1}), class_names=order)
    assert [fits(data.dataset(split), order) for split in ("train", "val")] == [[1, 1, 2, 2, 0, 0], [1, 2]]


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_names_of_val(tmp_path, name):
    data = data_of(make(tmp_path, train=3, **{name: 1}))
    assert (len(data.dataset("train")), len(data.dataset("val"))) == (9, 3)


@pytest.mark.parametrize(("name", "split"), [("Val", "val"), ("eval", "val"), ("TEST", "test")])
def test_a_folder_that_is_meant_as_val_or_test_but_is_not_used_is_warned_of(tmp_path, name, split, recwarn):
    data = data_of(make(tmp_path, train=3, **{name: 1}))
    data.setup("fit")
    text = f"the folder {name} in {tmp_path} is not used: if it holds {split}, name it {split}"
    assert text in [str(warning.message) for warning in recwarn]
    recwarn.clear()
    data_of(make(tmp_path, **{split: 1})).setup("fit")
    assert not recwarn


def test_options_of_the_split_have_no_effect_where_there_is_a_val(tmp_path, recwarn):
    data_of(make(tmp_path, train=2, val=1), val_fraction=0.5, split_seed=3).setup("fit")
    assert [str(warning.message) for warning in recwarn] == [
        f"{name} has no effect, since the data have their own val" for name in ("val_fraction 0.5", "split_seed 3")
    ]


def test_classes_right_in_the_root_are_the_training_images(tmp_path):
    root = make(tmp_path, photos=20) + "/photos"
    data = data_of(root, val_fraction=0.25)
    assert data.class_names == ["ant", "bee", "cat"]
    assert (len(data.dataset("train")), len(data.dataset("val")), data.has_test) == (45, 15, False)
    fits(data.dataset("train"))
    # The same images are held out as from a folder named train.
    (tmp_path / "photos").rename(tmp_path / "train")
    other = paths(data_of(tmp_path, val_fraction=0.25).dataset("val"))
    assert [path.replace("/photos/", "/train/") for path in paths(data.dataset("val"))] == other
    (tmp_path / "train").rename(tmp_path / "photos")
    with pytest.raises(ValueError, match=r"no test folder in .*; move the class folders into .*photos.test, or"):
        data.setup("test")
    # With class names from a checkpoint, all images can be predicted.
    again = data_of(root, class_names=["cat", "bee", "ant"], val_fraction=0.25)
    assert set(paths(again.dataset("val"))) == set(paths(data.dataset("val")))
    assert len(predicted(again)) == 60
    # Training images need at least two class folders, which contain the images directly.
    for name in ("ant", "bee"):
        shutil.rmtree(tmp_path / "photos" / name)
    with pytest.raises(FileNotFoundError, match=r"no train folder in .* holds 'cat'; expected .* or two class folders"):
        data_of(root)
    with pytest.raises(FileNotFoundError, match="no train folder"):
        data_of(tmp_path)


def test_a_checkpoint_needs_no_train_folder(tmp_path):
    data = data_of(make(tmp_path, test={"cat": 2}), class_names=list(GREY))
    assert data.has_test
    data.setup("test")
    images, labels = next(iter(data.test_dataloader()))
    assert labels.tolist() == [2, 2]
    assert (images * 255).round().unique().tolist() == [200]
    with pytest.raises(ValueError, match="no train folder"):
        data.train_dataloader()
    with pytest.raises(ValueError, match="no val folder"):
        data.setup("validate")
    with pytest.raises(FileNotFoundError, match=r"no train folder in .* holds 'test'; expected .*class_names"):
        ImageFolderData(data.root)


def test_folders_are_recognised_by_their_first_images(tmp_path, monkeypatch):
    """A class may hold very many files on a slow network disk."""
    for name in ("ant", "bee", "cat"):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number}.png").touch()
    entries, scandir = [], os.scandir

    @contextmanager
    def counted(folder):
        with scandir(folder) as found:
            yield (entries.append(entry) or entry for entry in found)

    monkeypatch.setattr("relvit.app.data.modules.image_folder.look_into", lambda root: (["ant", "bee", "cat"], 0))
    monkeypatch.setattr(os, "scandir", counted)
    assert _holds_classes(str(tmp_path))
    assert len(entries) == 2


def test_split_is_stratified_and_disjoint(tmp_path):
    data = data_of(make(tmp_path, train={"ant": 20, "bee": 2, "cat": 1}), val_fraction=0.25, augment="resized-crop")
    train, val = data.dataset("train"), data.dataset("val")
    assert np.bincount(fits(train)).tolist() == [15, 1, 1]
    assert np.bincount(fits(val), minlength=3).tolist() == [5, 1, 0]
    assert not set(paths(train)) & set(paths(val))
    assert len(set(paths(train) + paths(val))) == 23
    assert ["RandomResizedCrop" in repr(dataset.transform) for dataset in (train, val)] == [True, False]
    # One image of each class remains in train.
    data = data_of(make(tmp_path / "b", train=4), val_fraction=0.99)
    assert np.bincount(data.dataset("train").targets).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="add images of val"):
        data_of(make(tmp_path / "c", train=1)).setup("fit")
    with pytest.raises(ValueError, match="val_fraction must be in 0 < x < 1, got 1"):
        data_of(data.root, val_fraction=1)


def test_a_training_in_the_folder_of_the_images(tmp_path, monkeypatch):
    """Without --runs, the folder of the runs is beside the class folders."""
    make(tmp_path, **{"": 4})
    monkeypatch.chdir(tmp_path)
    run = new_run_folder("runs", "relvit_tiny")
    add(run)
    (run / "run.json").touch()
    with pytest.warns(UserWarning, match="runs holds runs of relvit and is not a class"):
        data = data_of(".")
    assert data.class_names == ["ant", "bee", "cat"]
    data.setup("fit")
    # A class may have folders of any names, also beside folders that begin with a date and a time.
    (run / "000.png").rename(run.parent / "000.png")
    assert data_of(".").class_names == ["ant", "bee", "cat", "runs"]


def test_folders_and_images_of_a_camera_are_no_runs(tmp_path):
    root = make(tmp_path, train=2)
    add(tmp_path / "train" / "dog" / "2024-05-01_12-30-11_burst")
    add(tmp_path / "train" / "owl")
    (tmp_path / "train" / "owl" / "000.png").rename(tmp_path / "train" / "owl" / "2024-05-01_12-30-12_1.png")
    data = data_of(root)
    assert data.class_names == ["ant", "bee", "cat", "dog", "owl"]
    assert [sum(name in path for path in paths(data.dataset("train"))) for name in ("dog", "owl")] == [1, 1]


def test_a_file_whose_name_is_not_utf_8_is_held_out_like_others(tmp_path):
    root = make(tmp_path, train=4)
    for path in list((tmp_path / "train").glob("*/*")):
        os.rename(path, os.fsencode(path) + b"\xe9.png")
    data = data_of(root)
    assert ["\udce9.png" in name for name, _ in data.held_out()] == [True] * 3


def test_split_depends_on_its_own_seed_only(tmp_path):
    root = make(tmp_path / "a", train=30)
    first = paths(data_of(root).dataset("val"))
    torch.manual_seed(99)
    np.random.seed(99)
    assert paths(data_of(root).dataset("val")) == first
    assert paths(data_of(root, split_seed=1).dataset("val")) != first
    # The split does not depend on the place of the folder, either.
    shutil.copytree(root, tmp_path / "b")
    moved = paths(data_of(str(tmp_path / "b")).dataset("val"))
    assert [path.replace(str(tmp_path / "b"), root) for path in moved] == first
    # An additional image in one class does not change the split of the other classes.
    add(tmp_path / "a" / "train" / "ant", count=31)
    later = paths(data_of(root).dataset("val"))
    assert [path for path in later if "ant" not in path] == [path for path in first if "ant" not in path]


def predicted(data):
    data.setup("predict")
    return [path for _, names in data.predict_dataloader() for path in names]


def test_predict_takes_test_then_val_then_all(tmp_path):
    root = make(tmp_path / "a", train=2, val={"bee": 2}, test={"cat": 1})
    add(tmp_path / "a" / "test")
    assert predicted(data_of(root)) == [f"{root}/test/000.png", f"{root}/test/cat/000.png"]
    shutil.rmtree(tmp_path / "a" / "test")
    assert predicted(data_of(root)) == [f"{root}/val/bee/000.png", f"{root}/val/bee/001.png"]
    shutil.rmtree(tmp_path / "a" / "val")
    with pytest.raises(ValueError, match="no test or val folder"):
        predicted(data_of(root))
    add(tmp_path / "b" / "deep" / "er")
    add(tmp_path / "b")
    (tmp_path / "b" / "notes.txt").write_text("no image")
    root = str(tmp_path / "b")
    assert predicted(data_of(root, class_names=list(GREY))) == [f"{root}/000.png", f"{root}/deep/er/000.png"]
    (tmp_path / "c").mkdir()
    with pytest.raises(ValueError, match="no image below"):
        predicted(data_of(str(tmp_path / "c"), class_names=list(GREY)))


def test_mistakes(tmp_path):
    root = make(tmp_path, train=2, val=1)
    data = data_of(root)
    for attempt in (data.test_dataloader, lambda: data.setup("test"), lambda: data.samples("test")):
        with pytest.raises(ValueError, match=r"no test folder in .*; add the images as .*<class>"):
            attempt()
    with pytest.raises(ValueError, match="'ant' more than once"):
        data_of(root, class_names=["ant", "bee", "ant"])
    for options, advice, count in ({}, "remove it or add", 6), ({"class_names": [*GREY, "dog"]}, "add", 7):
        folder = tmp_path / "train" / "dog"
        folder.mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=f"dog holds no image; {advice} images whose"):
            data_of(root, **options).dataset("train")
        add(folder) if options else folder.rmdir()
        assert len(data_of(root, **options).dataset("train")) == count
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="has no image of the classes 'dog' of class_names"):
        data_of(root, class_names=[*GREY, "dog"]).setup("fit")
    make(tmp_path, test=1)
    (tmp_path / "test" / "cat").rename(tmp_path / "test" / "cats")
    with pytest.raises(ValueError, match=rf"give the folder that holds it, {tmp_path} "):
        data_of(f"{root}/train").setup("test")
    make(tmp_path, val=2)
    # `val` has class folders, but its images must not be split into train and val.
    with pytest.raises(ValueError, match=rf"no val folder in {root}/val; give the folder that holds it, {tmp_path} "):
        data_of(f"{root}/val").setup("validate")
    with pytest.raises(ValueError, match=r"test.cats is a class .*did you mean 'cat'"):
        data_of(root).setup()
    for count, found in (1, "1 image"), (2, "2 images"):
        add(tmp_path / "flat", count=count)
        with pytest.raises(ValueError, match=f"flat has {found} directly in it, without class folders; expected"):
            ImageFolderData(str(tmp_path / "flat"))
    # There are class folders, but the images of one of them are in a folder below it.
    add(tmp_path / "flat" / "cat")
    add(tmp_path / "flat" / "dog" / "more")
    with pytest.raises(FileNotFoundError, match=r"holds 'cat', 'dog'; .* two class folders with images directly in"):
        ImageFolderData(str(tmp_path / "flat"))
