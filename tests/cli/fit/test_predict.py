"""`relvit predict`: its table, row by row, and how it goes on past what cannot be read."""

import csv
import os
import random
import shutil

import pytest
import torch
from photos import CLASSES
from PIL import Image
from processes import BY_ITSELF, Ranks, as_torchrun, finish, start

from relvit.cli import main
from relvit.data import eval_transform
from relvit.training import load_classifier

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def predict(run, runs, *arguments):
    """Exit status, and the folder that came."""
    best = f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}"
    status = main(["predict", best, f"--runs={runs}", *arguments, *QUIET])
    (folder,) = runs.iterdir()
    return status, folder


def by_hand(run, path, size=16):
    """Probabilities of the classes, from the file to the softmax."""
    image = eval_transform(size, *IMAGENET, 0.9)(Image.open(path).convert("RGB"))
    return load_classifier(run / "checkpoints" / "best.ckpt")(image[None])[0].detach().softmax(0)


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, colour in CLASSES.items():
        Image.new("RGB", (30, 20), colour).save(folder / f"some {name}.png")
    return folder


def test_a_row_per_image_in_the_order_of_the_paths(run, pictures, tmp_path, capsys):
    status, folder = predict(run, tmp_path / "runs", f"--data.root={pictures}")
    assert status == 0
    assert f"3 predictions in {folder / 'predictions.csv'}" in capsys.readouterr().out
    found = rows(folder / "predictions.csv")
    # three classes, so no fourth and fifth
    header = ["path", "class", "probability", "class2", "probability2", "class3", "probability3"]
    assert list(found[0]) == header
    assert [row["path"] for row in found] == [f"{pictures}/some {name}.png" for name in ("cat", "dog", "owl")]
    for row in found:
        expected = sorted(zip(by_hand(run, row["path"]).tolist(), CLASSES, strict=True), reverse=True)
        for place, (probability, name) in zip(("", "2", "3"), expected, strict=True):
            assert row[f"class{place}"] == name
            assert float(row[f"probability{place}"]) == pytest.approx(probability, abs=2e-6)
    assert not (folder / "unreadable.csv").exists()


def test_ten_classes_give_five(digits_run, tmp_path):
    status, folder = predict(digits_run, tmp_path / "runs")
    found = rows(folder / "predictions.csv")
    assert status == 0
    assert list(found[0])[-1] == "probability5"
    assert [row["path"] for row in found] == [f"digits/test/{i:04d}" for i in range(360)]
    for row in found[::40]:
        values = [float(row[f"probability{place}"]) for place in ("", "2", "3", "4", "5")]
        assert values == sorted(values, reverse=True)
        assert len({row[f"class{place}"] for place in ("", "2", "3", "4", "5")}) == 5


def test_classes_are_the_checkpoints_whatever_the_folders_are_and_however_they_are_listed(
    run, photos, tmp_path, monkeypatch
):
    """Folders of other names, in another order, listed at random: the same file gets the same row."""
    root = tmp_path / "photos"
    shutil.copytree(photos / "test", root / "test")
    _, plain = predict(run, tmp_path / "plain", f"--data.root={root}")
    (root / "test" / "cat").rename(root / "test" / "zebra")
    (root / "test" / "owl").rename(root / "test" / "aardvark")
    scandir, listdir = os.scandir, os.listdir

    class Shuffled:
        def __init__(self, *args):
            with scandir(*args) as entries:
                self.entries = list(entries)
            random.Random(0).shuffle(self.entries)
            self.rest = iter(self.entries)

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.rest)

        def __enter__(self):
            return self

        def __exit__(self, *args):
            self.close()

        def close(self):
            pass

    monkeypatch.setattr(os, "scandir", Shuffled)
    monkeypatch.setattr(os, "listdir", lambda *args: sorted(listdir(*args), reverse=True))
    _, renamed = predict(run, tmp_path / "renamed", f"--data.root={root}")
    monkeypatch.undo()
    found, expected = rows(renamed / "predictions.csv"), rows(plain / "predictions.csv")
    assert [row["path"] for row in found] == sorted(row["path"] for row in found)
    old = {"zebra": "cat", "aardvark": "owl", "dog": "dog"}
    by_path = {row.pop("path"): row for row in expected}
    for row in found:
        *_, folder, name = row.pop("path").split("/")
        assert row == by_path[f"{root}/test/{old[folder]}/{name}"]


def test_broken_files_are_left_out_listed_and_counted(run, pictures, tmp_path, capsys):
    _, whole = predict(run, tmp_path / "whole", f"--data.root={pictures}")
    content = (pictures / "some cat.png").read_bytes()
    (pictures / "half.png").write_bytes(content[: len(content) // 2])
    (pictures / "empty.jpg").touch()
    (pictures / "text.png").write_text("not an image")
    capsys.readouterr()
    status, folder = predict(run, tmp_path / "runs", f"--data.root={pictures}")
    out = capsys.readouterr().out
    assert status == 0
    assert f"3 images could not be read and were left out. {folder / 'unreadable.csv'} says why." in out
    assert f"3 predictions in {folder / 'predictions.csv'}" in out
    assert rows(folder / "predictions.csv") == rows(whole / "predictions.csv")
    listed = {row["path"]: row["reason"] for row in rows(folder / "unreadable.csv")}
    assert list(listed) == [f"{pictures}/{name}" for name in ("empty.jpg", "half.png", "text.png")]
    assert [next(w for w in ("zero bytes", "broken", "not an image") if w in reason) for reason in listed.values()] == [
        "zero bytes",
        "broken",
        "not an image",
    ]


def test_broken_files_stop_it_where_that_is_asked_for(run, pictures, tmp_path, capsys):
    (pictures / "empty.jpg").touch()
    best = f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}"
    arguments = ["predict", best, f"--runs={tmp_path / 'runs'}", f"--data.root={pictures}", "--data.on_error=error"]
    assert main([*arguments, *QUIET]) == 2
    assert f"cannot read image {pictures}/empty.jpg: the file is empty" in capsys.readouterr().err


def test_nothing_can_be_read(run, tmp_path, capsys):
    (tmp_path / "pictures").mkdir()
    for name in "ab":
        (tmp_path / "pictures" / f"{name}.jpg").touch()
    status, folder = predict(run, tmp_path / "runs", f"--data.root={tmp_path / 'pictures'}")
    assert status == 2
    assert f"none of the images could be read; {folder / 'unreadable.csv'} says why" in capsys.readouterr().err
    assert len(rows(folder / "unreadable.csv")) == 2
    assert rows(folder / "predictions.csv") == []


def test_other_sizes(run, pictures, tmp_path):
    status, folder = predict(run, tmp_path / "runs", f"--data.root={pictures}", "--data.img_size=[24,40]")
    assert status == 0
    for row in rows(folder / "predictions.csv"):
        probability, index = by_hand(run, row["path"], (24, 40)).max(0)
        assert row["class"] == list(CLASSES)[int(index)]
        assert float(row["probability"]) == pytest.approx(float(probability), abs=2e-6)
        assert torch.isfinite(probability)


def two(arguments, folder, launcher):
    """Exit status and output of two processes."""
    if launcher == "relvit":
        return finish(start([*arguments, *BY_ITSELF], folder))
    ranks = Ranks(arguments, folder, as_torchrun())
    return max(ranks.finish()), ranks.logs[0].read_text(), ranks.text()


@pytest.mark.parametrize(("launcher", "images"), [("torchrun", 1), ("relvit", 3)])
def test_two_processes_write_the_table_of_one(run, pictures, tmp_path, launcher, images):
    """With broken files in between, and with fewer images than processes."""
    for path in sorted(pictures.iterdir())[images:]:
        path.unlink()
    # Of the first process's share two are broken, of the second's one.
    for name in ("a.png", "some a.png", "zebra.png") if images > 1 else ():
        (pictures / name).touch()
    _, one = predict(run, tmp_path / "one", f"--data.root={pictures}")
    best = f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}"
    arguments = ["predict", best, f"--runs={tmp_path / 'two'}", f"--data.root={pictures}", "--data.batch_size=1"]
    status, out, err = two([*arguments, *QUIET], tmp_path, launcher)
    assert status == 0, err[-3000:]
    (made,) = (tmp_path / "two").iterdir()
    assert out.count(f"{images} predictions in {made / 'predictions.csv'}") == 1
    expected = rows(one / "predictions.csv")
    assert len(expected) == images
    for ours, theirs in zip(rows(made / "predictions.csv"), expected, strict=True):
        for name, value in theirs.items():
            same = pytest.approx(float(value), abs=2e-6) if "probability" in name else value
            assert (float(ours[name]) if "probability" in name else ours[name]) == same
    assert {path.name for path in made.iterdir()} == {path.name for path in one.iterdir()}


def test_two_processes_that_can_read_nothing_say_so_once(run, tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.jpg").touch()
    arguments = ["predict", f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}", f"--data.root={tmp_path / 'pictures'}"]
    status, _, text = two([*arguments, *QUIET], tmp_path, "torchrun")
    assert status == 2
    assert text.count("none of the images could be read") == 1


def test_an_interrupted_table_is_none(run, pictures, tmp_path):
    (pictures / "text.png").write_text("not an image")
    best = f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}"
    arguments = ["predict", best, f"--runs={tmp_path / 'runs'}", f"--data.root={pictures}", "--data.on_error=error"]
    assert main([*arguments, "--data.batch_size=1", *QUIET]) == 2
    assert list((tmp_path / "runs").iterdir()) == []


def test_names_of_all_bytes_come_into_the_tables(run, pictures, tmp_path, capsys):
    odd = [os.fsdecode(b"caf\xe9.png"), 'a, "b"\nc.png']
    for name in odd:
        shutil.copy(pictures / "some cat.png", pictures / name)
    (pictures / os.fsdecode(b"broken\xff.png")).write_bytes(b"")
    status, folder = predict(run, tmp_path / "runs", f"--data.root={pictures}")
    assert status == 0
    names = {os.path.basename(row["path"]) for row in rows(folder / "predictions.csv")}
    assert names == {r"caf\xe9.png", 'a, "b"\nc.png', *(f"some {name}.png" for name in CLASSES)}
    (broken,) = rows(folder / "unreadable.csv")
    assert broken["path"] == rf"{pictures}/broken\xff.png"
    for output in ("x.npz", "x.csv"):
        best = f"--ckpt_path={run / 'checkpoints' / 'best.ckpt'}"
        assert main(["embed", best, f"--root={pictures}", f"--output={tmp_path / output}", "--num_workers=0"]) == 0
    assert rf"{pictures}/caf\xe9.png" in {row["path"] for row in rows(tmp_path / "x.csv")}
    assert [row["path"] for row in rows(tmp_path / "x.unreadable.csv")] == [broken["path"]]
