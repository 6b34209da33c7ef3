"""ReaderData: the same tests for Hugging Face datasets, WebDataset shards and tar archives, and the command line."""

import json
import pickle
import warnings

import pytest
from command_line import QUIET, rows
from grey_folders import GREY, fits
from photos import CLASSES, TINY
from stored_images import KINDS, data_of, grey_files, png, write
from torch.utils.data import ConcatDataset, DataLoader

import relvit
from relvit.app.cli import main
from relvit.app.data import ReaderData, UnreadableImageError
from relvit.app.data.inspect import check_data

BROKEN = png(0)[:40]
EACH = pytest.mark.parametrize("kind", KINDS)


@EACH
def test_labels_splits_and_names(kind, tmp_path):
    places = write(kind, tmp_path, {"train": grey_files(5), "val": grey_files(2), "test": grey_files(3)[:6]})
    data = data_of(**places, val_split="val", test_split="test")
    assert data.class_names == ["ant", "bee", "cat"]
    assert fits(data.dataset("train")) == [0] * 5 + [1] * 5 + [2] * 5
    assert fits(data.dataset("val")) == [0, 0, 1, 1, 2, 2]
    assert fits(data.dataset("test")) == [0, 0, 0, 1, 1, 1]
    assert (data.held_out(), data.has_test, data_of(**places).has_test) == ([], True, False)
    names = [name for _, name in data.dataset("predict")]
    assert len(set(names)) == 6
    assert all(str(tmp_path) in name and name.endswith(".png") for name in names)
    assert names == [str(image) for image, _ in data.dataset("test").samples]


@EACH
def test_a_split_that_is_meant_as_val_or_test_but_is_not_used_is_warned_of(kind, tmp_path):
    places = write(kind, tmp_path, {"train": grey_files(3), "validation": grey_files(1), "test": grey_files(1)})

    def notes(**named):
        with warnings.catch_warnings(record=True, action="always") as found:
            data_of(**places, **named).dataset("train")
        return [text for warning in found if "is not used" in (text := str(warning.message))]

    place = data_of(**places).place
    of_val, of_test = (
        f"the split '{name}' of {place} is not used: if it holds {split}, give --data.{split}_split {name}"
        for split, name in (("val", "validation"), ("test", "test"))
    )
    assert notes() == [of_val, of_test]
    assert notes(val_split="validation") == [of_test]
    assert notes(val_split="test") == []
    assert notes(val_split="validation", test_split="test") == []


@EACH
def test_a_part_of_train_is_put_aside_whatever_the_order(kind, tmp_path):
    files = grey_files(10)
    data = data_of(**write(kind, tmp_path / "a", {"train": files}), val_fraction=0.3)
    held_out = data.held_out()
    assert [label for _, label in held_out] == [0] * 3 + [1] * 3 + [2] * 3
    assert sorted(fits(data.dataset("train")) + fits(data.dataset("val"))) == [0] * 10 + [1] * 10 + [2] * 10
    images = {str(image) for split in ("train", "val") for image, _ in data.dataset(split).samples}
    assert len(images) == 30
    # In shards the names of these images depend on the order of the files, and with them the split.
    if kind != "wds":
        other = data_of(**write(kind, tmp_path / "b", {"train": files[::-1]}), val_fraction=0.3)
        assert sorted(other.held_out()) == sorted(held_out)
    # The arguments in a checkpoint build the same module.
    arguments = json.loads(json.dumps(data.init_args()))
    again = ReaderData(**arguments | {"balance": "loss"})
    assert again.held_out() == held_out
    assert str(tmp_path) not in str(held_out)
    assert again.init_args() == arguments | {"balance": "loss"}
    assert (arguments["class_names"], again.class_weights.tolist()) == (list(GREY), [1, 1, 1])
    assert ReaderData(**arguments | {"split_seed": 1}).held_out() != held_out


def test_class_names_name_numbered_classes(tmp_path):
    numbered = [(name, content, str([*GREY].index(label))) for name, content, label in grey_files(2)]
    places = write("wds", tmp_path, {"train": numbered})
    # One of the two images of each class is held out.
    assert fits(data_of(**places, class_names=["x", "y", "z"]).dataset("train")) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"has 2 images of an unknown class, such as .*: '2'; known are '0', '1'$"):
        data_of(**places, class_names=["x", "y"]).dataset("train")


@EACH
def test_class_names_of_a_checkpoint_keep_their_order(kind, tmp_path):
    places = write(kind, tmp_path, {"train": grey_files(2), "test": grey_files(1)})
    order = ["cat", "ant", "bee"]
    data = data_of(**places, test_split="test", class_names=order)
    assert fits(data.dataset("test"), order) == [1, 2, 0]
    with pytest.raises(
        ValueError, match=r"has 1 image of an unknown class, such as .*: 'cat' \(did you mean 'cats'\?\); known"
    ):
        data_of(**places, test_split="test", class_names=["ant", "bee", "cats"]).dataset("test")
    with pytest.raises(ValueError, match="has no image of the classes 'dog' of class_names"):
        data_of(**places, class_names=[*GREY, "dog"]).dataset("train")
    # The constructor looks for no files.
    gone = {key: value.replace(str(tmp_path), "/gone") for key, value in places.items()}
    data = data_of(**gone, class_names=order, test_split="test")
    with pytest.raises((ValueError, FileNotFoundError), match="/gone"):
        data.dataset("test")


@EACH
def test_unreadable_images(kind, tmp_path):
    files = grey_files(2)
    files[3] = ("bee/001.png", BROKEN, "bee")
    files[4] = ("cat/000.png", b"", "cat") if kind == "tar" else files[4]
    places = write(kind, tmp_path, {"train": files})
    with pytest.raises(UnreadableImageError, match=rf"cannot read image .*{tmp_path.name}.*bee/001\.png: .*; delete"):
        list(data_of(**places, val_split="train").val_dataloader())
    data = data_of(**places, val_split="train", on_error="skip", num_workers=2 if kind == "hfds" else 0)
    labels = [label for _, batch in data.val_dataloader() for label in batch.tolist()]
    assert labels == ([0, 0, 1, 2] if kind == "tar" else [0, 0, 1, 2, 2])
    found = {"/".join(path.split("/")[-2:]): why for path, why in data.unreadable["val"].items()}
    assert found["bee/001.png"] == "it is not an image, or of an unknown format"
    assert found.get("cat/000.png") == ("the file is empty (zero bytes)" if kind == "tar" else None)
    assert len(next(iter(data.train_dataloader()))[1]) == 6
    report = check_data(data_of(**places, val_fraction=0.5), processes=2 if kind == "wds" else 1)
    assert {bad["path"].split("/", 1)[1][-11:] for bad in report["bad"]} == found.keys()
    # All images of a class are equal, so each class is one group of duplicates.
    assert len(report["duplicates_across"]) == (1 if kind == "tar" else 2)


@pytest.fixture
def greys_of_all_kinds(tmp_path):
    """Write the same 60 images in each format, and read one image of each format in this process."""
    datasets = []
    for kind in KINDS:
        data = data_of(**write(kind, tmp_path / kind, {"train": grey_files(20)}), val_split="train")
        assert data.dataset("val")[0][1] == 0
        datasets.append(data.dataset("val"))
    return ConcatDataset(datasets)


def test_loader_workers(greys_of_all_kinds):
    labels = []
    for images, batch in DataLoader(greys_of_all_kinds, batch_size=3, shuffle=True, num_workers=2):
        assert (images[:, 0, 0, 0] * 255).round().tolist() == [list(GREY.values())[label] for label in batch]
        labels += batch.tolist()
    assert sorted(labels) == [0] * 60 + [1] * 60 + [2] * 60


def test_datasets_are_handed_to_spawned_workers(greys_of_all_kinds):
    """The pickle of a dataset must contain neither open files, which cannot be pickled, nor images."""
    content = pickle.dumps(greys_of_all_kinds)
    assert png(GREY["bee"]) not in content
    copy = pickle.loads(content)
    assert len(copy) == 180
    for dataset in copy.datasets:
        assert fits(dataset) == [0] * 20 + [1] * 20 + [2] * 20


@EACH
def test_labels_are_read_without_images(kind, tmp_path, monkeypatch):
    files = [(name, b"no image", label) for name, _, label in grey_files(3)]
    places = write(kind, tmp_path, {"train": files})
    monkeypatch.setattr("PIL.Image.open", lambda *args: pytest.fail("decodes"))
    data = data_of(**places, balance="sampler")
    assert data.dataset("train").targets == [0, 0, 1, 1, 2, 2]
    assert len(list(data.train_dataloader().sampler)) == 6


@pytest.mark.parametrize("kind", ["hfds", "wds"])
def test_images_without_a_label(kind, tmp_path):
    files = [*grey_files(2), ("x.png", png(5), "-1"), ("y.png", png(5), "")]
    places = write(kind, tmp_path, {"train": files, "test": [("x.png", png(5), "-1")]})
    data = data_of(**places, val_split="train", test_split="test")
    with pytest.warns(
        UserWarning, match=r"the split 'train' .* has no label for 2 of 8 images, such as .*x.png: left out"
    ):
        assert fits(data.dataset("train")) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(
        ValueError, match=r"no image of the split 'test' .* has a label: use this split for predictions alone"
    ):
        data.dataset("test")
    assert len(data.dataset("predict")) == 1


def test_predict_takes_a_folder_or_an_archive(tmp_path):
    places = write("tar", tmp_path / "data", {"train": grey_files(2)})
    with pytest.raises(ValueError, match=r"nothing to predict; give a folder of images \(--data.predict\)"):
        data_of(**places).dataset("predict")
    (tmp_path / "more" / "deep").mkdir(parents=True)
    (tmp_path / "more" / "deep" / "a.png").write_bytes(png(7))
    data = data_of(**places, predict=str(tmp_path / "more"))
    assert [name for _, name in data.dataset("predict")] == [f"{tmp_path}/more/deep/a.png"]
    data = data_of(**places, predict=f"{tmp_path}/data/train.tar", test_split="train")
    assert [name for _, name in data.dataset("predict")][:2] == [
        f"{tmp_path}/data/train.tar/ant/00{i}.png" for i in (0, 1)
    ]
    with pytest.raises(ValueError, match="no image below"):
        data_of(**places, predict=str(tmp_path / "gone")).dataset("predict")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "name is ''; a name is hfds/NAME, wds/NAME, or the path of a tar"),
        ({"name": "hfds/"}, "name is 'hfds/'; a name is"),
        ({"name": "tfds/mnist"}, "data of the kind 'tfds' are not read: a name is hfds/NAME"),
        ({"name": "HFIDS/mnist"}, "data of the kind 'HFIDS' are not read"),
        ({"name": "nowhere/photos.tar"}, "neither a tar archive nor a folder of them at /.*nowhere/photos.tar"),
        ({"name": "photos", "input_key": "jpg"}, "input_key has no meaning for class folders in tar archives"),
        ({"name": "https://host/photos.tar"}, "https://host/photos.tar is not on disk; download"),
        ({"name": "wds/x", "root": "s3://bucket"}, "s3://bucket is not on disk"),
        ({"name": "wds/nowhere"}, "root /.*nowhere is not a folder"),
    ],
)
def test_wrong_names(arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ReaderData(**arguments)


@pytest.mark.slow
def test_on_the_command_line(tmp_path, photos, capsys):
    splits = {
        split: [(f"{path.parent.name}/{path.name}", path.read_bytes(), path.parent.name) for path in paths]
        for split in ("train", "test")
        if (paths := sorted((photos / split).rglob("*.jpg")))
    }
    places = write("hfds", tmp_path / "data", splits)
    arguments = [f"--data.{key}={value}" for key, value in places.items()]
    runs = tmp_path / "runs"
    arguments += ["--data.test_split=test", f"--runs={runs}", *TINY, "--trainer.max_epochs=1"]
    # The command line replaces the data module of this configuration, class folders.
    assert main(["fit", "--config=folder", "--data=ReaderData", *arguments]) == 0
    (folder,) = runs.iterdir()
    best = folder / "checkpoints" / "best.ckpt"
    assert [row["label"] for row in rows(folder / "val_split.csv")] == list(CLASSES)
    assert f"relvit predict {best} FOLDER_OF_IMAGES" in capsys.readouterr().out
    for command in ("test", "predict"):
        assert main([command, f"--ckpt_path={best}", f"--runs={runs}", *QUIET]) == 0
    tested, predicted = (next(runs.glob(f"*_{command}")) for command in ("test", "predict"))
    known = {row["path"]: row["class"] for row in rows(predicted / "predictions.csv")}
    assert known.keys() == {f"{places['name']}/test/{name}" for name, _, _ in splits["test"]}
    wrong = {path: name for path, name in known.items() if path.split("/")[-2] != name}
    assert {row["path"]: row["predicted"] for row in rows(tested / "mistakes.csv")} == wrong
    image = photos / "test" / "cat" / "0.jpg"
    assert relvit.load(best).predict(str(image)).name == known[f"{places['name']}/test/cat/0.jpg"]
