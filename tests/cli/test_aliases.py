"""Short names of options and arguments without a name: what the parser gets, and what a user gets."""

import csv
import json
import os
import shutil

import numpy as np
import pytest
from photos import CLASSES, TINY
from PIL import Image

from relvit.cli import main
from relvit.cli.aliases import rewrite
from relvit.cli.errors import UsageError
from relvit.data import DigitsData

QUIET = ["--accelerator=cpu", "--trainer.enable_progress_bar=false"]


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("fit", "--lr 0.1", "--model.lr=0.1"),
        ("fit", "--lr=0.1 --epochs 3", "--model.lr=0.1 --trainer.max_epochs=3"),
        ("fit", "--model relvit_tiny", "--model.model=relvit_tiny"),
        ("fit", "--model model.yaml", "--model=model.yaml"),
        ("fit", "--model={lr:1}", "--model={lr:1}"),
        ("fit", "--devices -1", "--trainer.devices=-1"),
        ("fit", "--root a", "--data=ImageFolderData --data.root=a"),
        ("fit", "--root a --data ImageNetData", "--data=ImageNetData --data.root=a"),
        ("fit", "--img_size 64 --config c.yaml", "--config=c.yaml --data.img_size=64"),
        ("fit", "--root a --config=c.yaml", "--config=c.yaml --data.root=a"),
        ("fit", "--lr_find --patience 3", "--lr_find=true --patience=3"),
        ("fit", "--model.opt_kwargs.betas [0.9,0.99]", "--model.opt_kwargs.betas=[0.9,0.99]"),
        ("fit", "--trainer.callbacks+=Timer", "--trainer.callbacks+=Timer"),
        ("validate", "a.ckpt --img_size 48", "--ckpt_path=a.ckpt --data.img_size=48"),
        ("validate", "--batch_size 8 a.ckpt", "--ckpt_path=a.ckpt --data.batch_size=8"),
        ("test", "--mirror a.ckpt --split val", "--mirror=true --split=val --ckpt_path=a.ckpt"),
        ("test", "--mirror False a.ckpt", "--mirror=False --ckpt_path=a.ckpt"),
        ("predict", "a.ckpt", "--ckpt_path=a.ckpt"),
        ("predict", "a.ckpt x y", '--ckpt_path=a.ckpt --paths=["x", "y"]'),
        ("predict", "x --ckpt_path a.ckpt y", '--ckpt_path=a.ckpt --paths=["x", "y"]'),
        ("predict", "a.ckpt -- -x.jpg", '--ckpt_path=a.ckpt --paths=["-x.jpg"]'),
        ("resolutions", "a.ckpt --sizes 24 [32,48] --data.root r", "--sizes=[24,[32,48]] --root=r --ckpt_path=a.ckpt"),
        ("resolutions", "--sizes [24,32] a.ckpt", "--sizes=[24,32] --ckpt_path=a.ckpt"),
        ("resolutions", "--sizes=24 a.ckpt", "--sizes=[24] --ckpt_path=a.ckpt"),
        ("embed", "a.ckpt photos --output x.npz", "--output=x.npz --ckpt_path=a.ckpt --root=photos"),
        ("embed", "a.ckpt --data.root photos", "--root=photos --ckpt_path=a.ckpt"),
        ("export", "a.ckpt", "--ckpt_path=a.ckpt"),
        ("average", "a b --output c", '--output=c --ckpt_paths=["a", "b"]'),
        ("check-data", "photos", "--root=photos"),
    ],
)
def test_rewrite(command, given, expected):
    assert " ".join(rewrite(command, given.split()).arguments) == expected


@pytest.mark.parametrize(
    ("command", "given", "message"),
    [
        ("fit", "--lr 0.1 --model.lr 0.2", "--lr 0.1 and --model.lr 0.2 are two values for one option: give one"),
        ("embed", "--root a --data.root b", "--root a and --data.root b are two values"),
        ("fit", "photos", "unexpected argument 'photos': each value follows the name of its option; relvit fit --help"),
        ("validate", "a.ckpt b", "unexpected argument 'b'"),
        ("validate", "a.ckpt --ckpt_path b.ckpt", "unexpected argument 'a.ckpt': --ckpt_path given already"),
        ("embed", "a.ckpt x y", "unexpected argument 'y'"),
        ("validate", "a.ckpt --split test", "--split: validate uses the images of val; .* relvit test --split SPLIT"),
        ("validate", "a.ckpt --runs x", "--runs: validate prints its results and writes no file"),
    ],
)
def test_mistakes(command, given, message):
    with pytest.raises(UsageError, match=message):
        rewrite(command, given.split())


def test_the_same_value_twice_is_no_mistake():
    assert rewrite("fit", ["--lr", "0.1", "--model.lr=0.1"]).arguments == ["--model.lr=0.1", "--model.lr=0.1"]


def test_messages_name_what_was_typed(photos, tmp_path, capsys):
    fit = ["fit", f"--root={photos}", f"--runs={tmp_path}", *TINY]
    for given, message in {
        "--lr=fast": "--lr must be a number, got fast",
        "--model.lr=fast": "--model.lr must be a number, got fast",
        "--epoch=3": "unknown option --epoch (did you mean '--epochs'?)",
        "--img_sise=3": "unknown option --img_sise (did you mean '--img_size'?)",
    }.items():
        assert main([*fit, given]) == 2
        assert message in capsys.readouterr().err
    assert main(["resolutions", "a.ckpt"]) == 2
    assert "missing: --sizes; usage: relvit resolutions CKPT --sizes SIZE ... [options]" in capsys.readouterr().err


def test_a_training_by_short_names(photos, tmp_path, capsys):
    tiny = [option for option in TINY if "model_kwargs" in option]
    short = ["--root", photos, "--model", "test_relvit", "--img_size", "16", "--batch_size", "6", "--lr", "2e-3"]
    short += ["--epochs", "1", "--runs", tmp_path / "runs", "--num_workers", "0", *QUIET]
    assert main(["fit", *map(str, short), *tiny]) == 0
    assert "16 x 16 px x 3, batch 6" in capsys.readouterr().out
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["lr"] == 2e-3


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """Pictures in folders, with a GIF, an odd name, a file without an ending and one that is no image."""
    monkeypatch.chdir(tmp_path)
    for place, colour in zip(("a/1.png", "a/b/2.jpg", "c/3.gif"), CLASSES.values(), strict=True):
        os.makedirs(os.path.dirname(place), exist_ok=True)
        Image.new("RGB", (20, 20), colour).save(place)
    shutil.copy("a/1.png", os.fsdecode(b"c/caf\xe9.png"))
    shutil.copy("a/1.png", "c/bare")
    os.makedirs("d")
    open("d/notes.txt", "w").close()
    return tmp_path


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a/1.png"], ["a/1.png"]),
        (["c/bare", "a"], ["c/bare", "a/1.png", "a/b/2.jpg"]),
        (["a", "a/1.png"], ["a/1.png", "a/b/2.jpg"]),
        (["c"], ["c/3.gif", r"c/caf\xe9.png"]),
        ([os.fsdecode(b"c/caf\xe9.png")], [r"c/caf\xe9.png"]),
        (["*/*.png"], ["a/1.png", r"c/caf\xe9.png"]),
        (["**/*.jpg", "[c-d]"], ["a/b/2.jpg", "c/3.gif", r"c/caf\xe9.png"]),
        (["a/**"], ["a/1.png", "a/b/2.jpg"]),
    ],
)
def test_predict_takes_files_folders_and_patterns(run, pictures, paths, expected):
    best = str(run / "checkpoints" / "best.ckpt")
    assert main(["predict", best, *paths, *QUIET]) == 0
    (folder,) = (pictures / "runs").iterdir()
    assert [row["path"] for row in rows(folder / "predictions.csv")] == expected


def test_paths_that_lead_nowhere(run, pictures, capsys):
    best = str(run / "checkpoints" / "best.ckpt")
    for paths, message in {
        ("e.jpg",): "no file or folder 'e.jpg'",
        ("*.bmp",): "no image matches the pattern '*.bmp'",
        ("d",): "no image below d",
        ("a", "--root=c"): "--root c and a both name the images: give one of them",
        ("a", "c", "--data=DigitsData"): "--data DigitsData and a (and 1 more) both name the images",
    }.items():
        assert main(["predict", best, *paths, *QUIET]) == 2
        assert message in capsys.readouterr().err
    assert not list((pictures / "runs").iterdir())


def test_predict_gives_files_what_the_root_gives(run, photos, tmp_path):
    best = str(run / "checkpoints" / "best.ckpt")
    for name, given in {"root": [f"--root={photos / 'test'}"], "paths": [str(photos / "test")]}.items():
        assert main(["predict", best, *given, f"--runs={tmp_path / name}", "--img_size=24", *QUIET]) == 0
    one, other = ((tmp_path / name).glob("*/predictions.csv") for name in ("root", "paths"))
    assert next(one).read_text() == next(other).read_text()


def test_grey_models_take_files(digits_run, tmp_path):
    """Digits written into colour files get the probabilities that the grey images in memory get."""
    best = str(digits_run / "checkpoints" / "best.ckpt")
    assert main(["predict", best, f"--runs={tmp_path / 'memory'}", *QUIET]) == 0
    expected = rows(next((tmp_path / "memory").glob("*/predictions.csv")))[:5]
    for number, image in enumerate(DigitsData().dataset("test").images[:5]):
        Image.fromarray(np.stack([image.numpy()] * 3, -1)).save(tmp_path / f"{number}.png")
    assert main(["predict", best, str(tmp_path / "*.png"), f"--runs={tmp_path / 'files'}", *QUIET]) == 0
    found = rows(next((tmp_path / "files").glob("*/predictions.csv")))
    for ours, theirs in zip(found, expected, strict=True):
        assert float(ours["probability"]) == pytest.approx(float(theirs["probability"]), abs=2e-6)
        assert ours["class"] == theirs["class"]


@pytest.mark.parametrize("split", ["train", "val"])
def test_test_of_another_split(run, photos, tmp_path, split, capsys):
    """Each image once, in order and without augmentation: as if its folder were the one of test."""
    best, root = str(run / "checkpoints" / "best.ckpt"), tmp_path / "photos"
    shutil.copytree(photos / split, root / "test")
    given = {"split": [f"--root={photos}", f"--split={split}"], "folder": [f"--root={root}"]}
    for name, options in given.items():
        # More augmentation than the training had, which must have no effect.
        options = [*options, "--data.augment=deit", f"--runs={tmp_path / name}", "--batch_size=5", *QUIET]
        assert main(["test", best, *options]) == 0
    assert f"18 images of {split}, mean F1" in capsys.readouterr().out
    found, expected = (next((tmp_path / name).glob("*")) for name in given)
    for name in ("classes.csv", "confusion.csv"):
        assert (found / name).read_text() == (expected / name).read_text()
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (found, expected))
    assert (ours.pop("split"), theirs.pop("split")) == (split, "test")
    assert ours.pop("img_size") == theirs.pop("img_size")
    assert ours == pytest.approx(theirs)


def test_test_of_images_in_memory_and_resolutions_of_train(digits_run, run, tmp_path, capsys):
    best = str(digits_run / "checkpoints" / "best.ckpt")
    assert main(["test", best, "--split=train", f"--runs={tmp_path}", *QUIET]) == 0
    (folder,) = tmp_path.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["images"] == len(DigitsData().dataset("train"))
    assert rows(folder / "mistakes.csv")[0]["path"].startswith("train/")
    arguments = ["resolutions", best, "--sizes", "8", "--split=train", f"--output={tmp_path / 'table.csv'}"]
    assert main([*arguments, "--accelerator=cpu"]) == 0
    assert float(rows(tmp_path / "table.csv")[0]["acc1"]) == pytest.approx(summary["test/acc1"])


def test_quiet_takes_no_value():
    assert rewrite("fit", ["-q", "--epochs", "2"]).arguments == ["-q", "--trainer.max_epochs=2"]
    assert rewrite("fit", ["--quiet", "--lr=1"]).arguments == ["--quiet", "--model.lr=1"]
