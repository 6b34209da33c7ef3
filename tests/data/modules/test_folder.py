"""Classes by name, the seeded split, every layout of a folder of images."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from grey_folders import GREY, add, data_of, make
from PIL import Image
from torch.utils.data import DataLoader

from relvit.data import ImageFolderData, load_rgb


def labels_fit_pixels(data, dataset):
    assert len(dataset) > 0
    for image, label in dataset:
        assert round(float(image[0, 0, 0]) * 255) == GREY[data.class_names[label]]


def test_defaults(tmp_path):
    data = ImageFolderData(make(tmp_path, train=2))
    assert (data.class_names, data.num_classes, data.in_chans) == (["ant", "bee", "cat"], 3, 3)
    assert (data.img_size, data.augment, data.crop_pct, data.num_workers) == ((224, 224), "resized-crop", 0.9, 2)
    assert not data.has_test


def test_construction_reads_no_files(tmp_path, monkeypatch):
    root = make(tmp_path, train=2, val=1)
    monkeypatch.setattr("relvit.data.images.folders.os.walk", lambda *_, **__: pytest.fail("walked"))
    assert data_of(root).num_classes == 3


def test_classes_are_matched_by_name_where_val_lacks_one(tmp_path):
    data = data_of(make(tmp_path, train=2, val={"bee": 2, "cat": 1}, test={"cat": 3}))
    data.setup()
    assert [label for _, label in data.dataset("val")] == [1, 1, 2]
    assert [label for _, label in data.dataset("test")] == [2, 2, 2]
    for split in ("train", "val", "test"):
        labels_fit_pixels(data, data.dataset(split))


def test_classes_of_a_checkpoint_in_another_order(tmp_path):
    data = data_of(make(tmp_path, train=2, val={"bee": 1, "ant": 1}), class_names=["cat", "ant", "bee"])
    assert [label for _, label in data.dataset("val")] == [1, 2]
    for split in ("train", "val"):
        labels_fit_pixels(data, data.dataset(split))


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_names_of_val(tmp_path, name):
    data = data_of(make(tmp_path, train=3, **{name: 1}))
    assert len(data.dataset("train")) == 9
    assert len(data.dataset("val")) == 3


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


def paths(dataset):
    return [path for path, _ in dataset.samples]


def test_split_is_stratified_and_disjoint(tmp_path):
    data = data_of(make(tmp_path, train={"ant": 20, "bee": 2, "cat": 1}), val_fraction=0.25)
    train, val = data.dataset("train"), data.dataset("val")
    assert np.bincount(train.targets).tolist() == [15, 1, 1]
    assert np.bincount(val.targets, minlength=3).tolist() == [5, 1, 0]
    assert not set(paths(train)) & set(paths(val))
    assert len(set(paths(train) + paths(val))) == 23
    labels_fit_pixels(data, train)
    labels_fit_pixels(data, val)


def test_one_training_image_of_each_class_remains(tmp_path):
    data = data_of(make(tmp_path, train=4), val_fraction=0.99)
    assert np.bincount(data.dataset("train").targets).tolist() == [1, 1, 1]
    assert np.bincount(data.dataset("val").targets).tolist() == [3, 3, 3]


def test_split_depends_on_its_own_seed_only(tmp_path):
    root = make(tmp_path / "a", train=30)
    first = paths(data_of(root).dataset("val"))
    torch.manual_seed(99)
    np.random.seed(99)
    assert paths(data_of(root).dataset("val")) == first
    assert paths(data_of(root, split_seed=1).dataset("val")) != first
    # and neither on where the folder is
    shutil.copytree(root, tmp_path / "b")
    moved = paths(data_of(str(tmp_path / "b")).dataset("val"))
    assert [path.replace(str(tmp_path / "b"), root) for path in moved] == first
    # an image more in one class changes nothing in the others
    add(tmp_path / "a" / "train" / "ant", count=31)
    later = paths(data_of(root).dataset("val"))
    assert [path for path in later if "ant" not in path] == [path for path in first if "ant" not in path]


def test_parts_of_train_have_their_own_transform(tmp_path):
    data = data_of(make(tmp_path, train=10), augment="crop-flip")
    assert "RandomCrop" in repr(data.dataset("train"))
    assert "RandomCrop" not in repr(data.dataset("val"))


def test_non_square_size(tmp_path):
    values = np.zeros((6, 4, 3), np.uint8)
    values[0] = 255  # the upper row is white
    for name in ("a", "b"):
        add(tmp_path / "val" / name)
        Image.fromarray(values).save(tmp_path / "val" / name / "000.png")
    data = data_of(str(tmp_path), class_names=["a", "b"], img_size=(6, 4), crop_pct=1.0)
    images, _ = next(iter(data.val_dataloader()))
    assert images.shape == (2, 3, 6, 4)
    assert images[0, 0].tolist() == [[1.0] * 4] + [[0.0] * 4] * 5


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


def test_init_args_through_json(tmp_path):
    data = data_of(make(tmp_path, train=20), class_names=["cat", "bee", "ant"], split_seed=5, img_size=(4, 6))
    args = json.loads(json.dumps(data.init_args()))
    assert args["class_names"] == ["cat", "bee", "ant"]
    again = ImageFolderData(**args)
    assert again.init_args() == data.init_args()
    assert again.img_size == (4, 6)
    assert paths(again.dataset("val")) == paths(data.dataset("val"))
    assert again.dataset("val").targets == data.dataset("val").targets


def test_broken_image_is_named(tmp_path):
    root = make(tmp_path, train=2, val=1)
    broken = tmp_path / "val" / "bee" / "000.png"
    broken.write_bytes(broken.read_bytes()[:40])
    with pytest.raises(ValueError, match=re.escape(str(broken))):
        list(data_of(root).val_dataloader())


def test_spawned_workers(tmp_path):
    data = data_of(make(tmp_path, train=3, val=1), augment="resized-crop")
    loader = DataLoader(data.dataset("train"), batch_size=9, num_workers=1, multiprocessing_context="spawn")
    images, labels = next(iter(loader))
    assert labels.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert (images[:, 0, 0, 0] * 255).round().tolist() == [10] * 3 + [100] * 3 + [200] * 3


def test_missing_train(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no train folder in .* holds 'test'; expected .*class_names"):
        ImageFolderData(make(tmp_path, test=1))


def test_missing_test(tmp_path):
    data = data_of(make(tmp_path, train=2))
    for attempt in (data.test_dataloader, lambda: data.setup("test")):
        with pytest.raises(ValueError, match=r"no test folder in .*; add the images as .*<class>"):
            attempt()


def test_images_without_class_folders(tmp_path):
    add(tmp_path / "a", count=2)
    with pytest.raises(ValueError, match=r"2 images are directly in .*, without class folders; expected"):
        ImageFolderData(str(tmp_path / "a"))


def test_class_named_twice(tmp_path):
    with pytest.raises(ValueError, match="'ant' more than once"):
        data_of(make(tmp_path, train=2), class_names=["ant", "bee", "ant"])


@pytest.mark.parametrize("split", ["val", "test"])
def test_empty_class_folder(tmp_path, split):
    root = make(tmp_path, train=2, val=1, test=1)
    shutil.rmtree(tmp_path / split / "bee")
    (tmp_path / split / "bee").mkdir()
    with pytest.raises(ValueError, match=rf"class folder .*{split}.bee holds no image; .*\.jpg"):
        data_of(root).setup()


def test_unknown_class(tmp_path):
    root = make(tmp_path, train=2, val=1, test=1)
    (tmp_path / "test" / "cat").rename(tmp_path / "test" / "cats")
    with pytest.raises(ValueError, match=r"test.cats is a class .*did you mean 'cat'"):
        data_of(root).setup()


def test_class_names_other_than_in_train(tmp_path):
    root = make(tmp_path, train=2)
    with pytest.raises(ValueError, match=r"train.cat is a class .*known"):
        data_of(root, class_names=["ant", "bee"]).setup("fit")
    with pytest.raises(ValueError, match=r"no folder for the classes \['dog'\]"):
        data_of(root, class_names=[*GREY, "dog"]).setup("fit")


def test_nothing_to_put_aside(tmp_path):
    with pytest.raises(ValueError, match="add a val folder"):
        data_of(make(tmp_path, train=1)).setup("fit")


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
def test_val_fraction_out_of_range(tmp_path, fraction):
    with pytest.raises(ValueError, match="val_fraction"):
        data_of(make(tmp_path, train=2), val_fraction=fraction)


def test_relative_load_rgb_path(tmp_path, monkeypatch):
    root = make(tmp_path / "photos", train=2, val=1)
    monkeypatch.chdir(tmp_path)
    data = data_of("photos")
    assert load_rgb(paths(data.dataset("val"))[0]).size == (6, 4)
    assert data.root == str(root)
