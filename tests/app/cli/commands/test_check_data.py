"""`relvit check-data` on a folder with every kind of flaw."""

import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

from relvit.app.cli import main
from relvit.app.data import ImageFolderData
from relvit.app.data import inspect as inspect_module
from relvit.app.data.inspect import check_data, inspect_image


def write(path, seed, size=(12, 8)):
    """Write a picture that differs for each seed; size is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def flawed(tmp_path):
    root = tmp_path / "photos"
    for number, (name, size) in enumerate([("cat", (12, 8)), ("cat", (20, 10)), ("dog", (12, 9)), ("dog", (16, 30))]):
        write(root / "train" / name / f"{number}.png", number, size)
    write(root / "val" / "cat" / "v.png", 10)
    write(root / "test" / "dog" / "t.png", 11)
    # Copy pictures: from train to test, in another format; within train, to another class; and within one class.
    Image.open(root / "train" / "cat" / "0.png").save(root / "test" / "dog" / "leak.bmp")
    shutil.copy(root / "train" / "dog" / "3.png", root / "train" / "cat" / "copy [1].png")
    Image.open(root / "train" / "cat" / "1.png").save(root / "train" / "cat" / "again.tif")
    whole = write(root / "val" / "dog" / "half.png", 12).read_bytes()
    (root / "val" / "dog" / "half.png").write_bytes(whole[: len(whole) // 2])
    (root / "train" / "dog" / "empty.jpg").touch()
    return root


def paths(groups):
    return [{image["path"] for image in group} for group in groups]


def check_report(report, root):
    assert [(file["split"], file["path"]) for file in report["bad"]] == [
        ("train", f"{root}/train/dog/empty.jpg"),
        ("val", f"{root}/val/dog/half.png"),
    ]
    assert "zero bytes" in report["bad"][0]["reason"]
    assert "broken" in report["bad"][1]["reason"]
    assert report["splits"]["train"] == {
        "images": 7,
        "classes": {"cat": 4, "dog": 3},
        "height": {"min": 8, "median": 10, "max": 30},  # The heights are 8, 10, 10, 30 (twice, for the copy), 9 and 30.
        "width": {"min": 12, "median": 16, "max": 20},
    }
    assert report["splits"]["val"]["classes"] == {"cat": 1, "dog": 1}
    leak = {f"{root}/train/cat/0.png", f"{root}/test/dog/leak.bmp"}
    assert paths(report["duplicates_across"]) == [leak]
    assert paths(report["duplicates_within"]) == [{f"{root}/train/cat/1.png", f"{root}/train/cat/again.tif"}]
    twice = {f"{root}/train/cat/copy [1].png", f"{root}/train/dog/3.png"}
    assert sorted(map(sorted, paths(report["duplicates_classes"]))) == sorted(map(sorted, [leak, twice]))
    for group in report["duplicates_classes"]:
        assert {image["class"] for image in group} == {"cat", "dog"}


def test_an_output_is_checked_before_the_images(flawed, fails):
    assert "output report.txt ends in '.txt'; allowed are .json" in fails(
        ["check-data", flawed, "--output", "report.txt"]
    )


@pytest.mark.parametrize("how", [["--root={}"], ["--data=ImageFolderData", "--data.root={}"]])
def test_command(flawed, tmp_path, how, capsys):
    output = tmp_path / "made" / "report.json"
    arguments = [argument.format(flawed) for argument in how]
    assert main(["check-data", *arguments, f"--processes={len(how)}", f"--output={output}"]) == 1
    check_report(json.loads(output.read_text()), flawed)
    out, err = capsys.readouterr()
    assert "files that cannot be read: 2" in out
    assert "the same image under different classes: 2" in out
    assert f"{flawed}/train/cat/copy [1].png (train, cat), {flawed}/train/dog/3.png (train, dog)" in out
    assert "the same image twice in a class: 1" in out
    assert f"train: {flawed}/train/dog/empty.jpg: the file is empty (zero bytes)" in out
    assert "the same image in several splits: 1" in out
    assert "11/11" in err


def test_a_clean_folder_exits_with_0_and_the_automatic_val_is_checked(tmp_path, capsys):
    for number in range(20):
        write(tmp_path / "train" / "ab"[number % 2] / f"{number}.png", number)
    # Copy each picture, so that the split into train and val puts the two pictures of some pair into different parts.
    for name in "ab":
        for path in list((tmp_path / "train" / name).iterdir()):
            shutil.copy(path, path.with_name(f"again{path.name}"))
    assert main(["check-data", f"--root={tmp_path}", "--processes=1"]) == 0
    assert "files that cannot be read: 0" in capsys.readouterr().out
    report = check_data(ImageFolderData(str(tmp_path), val_fraction=0.3), 1)
    assert report["splits"]["val"]["images"] == 12
    assert len(report["duplicates_across"]) + len(report["duplicates_within"]) == 20
    assert len(report["duplicates_across"]) > 0


def test_a_process_for_each_core_that_may_be_used(tmp_path, monkeypatch):
    for number, name in enumerate(("a/0", "a/1", "b/2", "b/3")):
        write(tmp_path / "train" / f"{name}.png", number)
    # A job on a cluster may be given fewer cores than the machine has. One process is none beside this one.
    monkeypatch.setattr(os, "cpu_count", lambda: 500)
    monkeypatch.setattr(inspect_module, "cores", lambda: 1)
    monkeypatch.setattr(inspect_module, "ProcessPoolExecutor", None)
    assert check_data(ImageFolderData(str(tmp_path), val_fraction=0.5))["bad"] == []


def test_equal_bytes_of_another_shape_are_another_image(tmp_path):
    tall, wide = (Image.new("RGB", size, (1, 2, 3)) for size in ((4, 6), (6, 4)))
    tall.save(tmp_path / "a.png")
    wide.save(tmp_path / "b.png")
    assert inspect_image(str(tmp_path / "a.png"))[:2] == (6, 4)
    assert inspect_image(str(tmp_path / "a.png")).digest != inspect_image(str(tmp_path / "b.png")).digest


def test_mistakes(tmp_path, fails):
    assert "give either --root DIR" in fails(["check-data"])
    for given in (["nowhere"], ["--root=nowhere"]):
        assert "error: nowhere is not a folder; give the one that holds train/<class>/<image>\n" in fails(
            ["check-data", *given]
        )
    assert "DigitsData has no image files: give data" in fails(["check-data", "--data=DigitsData"])
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match="has no labelled images in train, val or test"):
        check_data(ImageFolderData(str(tmp_path), class_names=["cat", "dog"]))
    write(tmp_path / "train" / "cat" / "0.png", 0)
    with pytest.raises(ValueError, match="processes must be 1 or more"):
        check_data(ImageFolderData(str(tmp_path), class_names=["cat", "dog"]), 0)
