"""`relvit predict`: the rows of its table, the paths that it accepts, and files that it cannot read."""

import os
import shutil
from collections import Counter
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from command_line import QUIET, evaluate, only, rows, summary, write_checkpoint_like
from photos import CLASSES
from PIL import Image
from processes import Ranks, as_torchrun
from timm.layers import to_2tuple

import relvit
from relvit import load
from relvit.app.cli import main
from relvit.app.cli.parser import Parser
from relvit.app.data import DigitsData, eval_transform
from relvit.app.data.images.folders import find_images
from relvit.app.training import load_classifier
from relvit.app.utils.shown_text import printable

predict = partial(evaluate, "predict")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def by_hand(best, path, size):
    """Compute the probabilities of the classes, from the image file to the softmax."""
    image = eval_transform(size, *IMAGENET, 0.9)(Image.open(path).convert("RGB"))
    return load_classifier(best)(image[None])[0].detach().softmax(0)


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, colour in CLASSES.items():
        Image.new("RGB", (30, 20), colour).save(folder / f"some {name}.png")
    return folder


def test_a_run_stands_for_its_best_checkpoint(run, pictures, tmp_path, fails):
    best = run / "checkpoints" / "best.ckpt"
    tables = []
    for given in (best, run, f"{run}/"):
        folder = predict(given, tmp_path / str(len(tables)), pictures)
        tables.append((folder / "predictions.csv").read_text())
    assert tables[0] == tables[1] == tables[2]
    assert relvit.load(run).class_names == relvit.load(best).class_names
    (tmp_path / "empty").mkdir()
    assert "empty is a folder without a .ckpt; give one, such as" in fails(["predict", tmp_path / "empty", pictures])


@pytest.mark.parametrize(("size", "option"), [(16, []), ((24, 40), ["--data.img_size=[24,40]"])])
def test_a_row_per_image_in_the_order_of_the_paths(best, pictures, tmp_path, size, option, capsys):
    folder = predict(best, tmp_path / "runs", f"--data.root={pictures}", *option)
    found = rows(folder / "predictions.csv")
    lines = [f"{row['path']}: {row['class']} {float(row['probability']):.2f}" for row in found]
    assert "\n".join([*lines, f"3 predictions in {folder / 'predictions.csv'}\n"]) in capsys.readouterr().out
    # The model has three classes, so there are no columns for a fourth and a fifth class.
    assert list(found[0]) == ["path", "class", "probability", "class2", "probability2", "class3", "probability3"]
    assert [row["path"] for row in found] == [f"{pictures}/some {name}.png" for name in ("cat", "dog", "owl")]
    for row in found:
        expected = sorted(zip(by_hand(best, row["path"], size).tolist(), CLASSES, strict=True), reverse=True)
        for place, (probability, name) in zip(("", "2", "3"), expected, strict=True):
            assert row[f"class{place}"] == name
            assert float(row[f"probability{place}"]) == pytest.approx(probability, abs=2e-6)
    assert not (folder / "unreadable.csv").exists()
    known = {"checkpoint": str(best), "reach": "trained", "img_size": list(to_2tuple(size)), "mirror": False}
    assert summary(folder) == known | {"images": 3}


def test_more_than_ten_images_are_counted_and_no_paths_mean_the_test_images(best, tmp_path, capsys):
    folder = predict(best, tmp_path / "runs")
    out = capsys.readouterr().out
    assert "No paths are given: these are the images of test, or else of val, of the training's data.\n" in out
    found = Counter(row["class"] for row in rows(folder / "predictions.csv"))
    counts = ", ".join(f"{name} {count}" for name, count in found.most_common())
    assert main(["predict", "--ckpt_path=nowhere.ckpt"]) == 2
    assert "No paths are given" not in capsys.readouterr().out
    assert f"18 predictions in {folder / 'predictions.csv'}; images of each class: {counts}\n" in out


def test_images_that_a_configuration_names_are_not_said_to_be_those_of_the_training(best, photos, tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text(f"data: {{class_path: ImageFolderData, init_args: {{root: {photos}}}}}\n")
    predict(best, tmp_path / "runs", f"--config={config}")
    assert "No paths are given" not in capsys.readouterr().out


def test_ten_classes_give_five_and_grey_models_take_files(digits_run, tmp_path):
    """Digits written into colour files get the probabilities that the grey images in memory get."""
    best = digits_run / "checkpoints" / "best.ckpt"
    folder = predict(best, tmp_path / "memory")
    expected = rows(folder / "predictions.csv")
    assert list(expected[0])[-1] == "probability5"
    assert [row["path"] for row in expected] == [f"digits/test/{i:04d}" for i in range(360)]
    for row in expected[::40]:
        values = [float(row[f"probability{place}"]) for place in ("", "2", "3", "4", "5")]
        assert values == sorted(values, reverse=True)
    for number, image in enumerate(DigitsData().dataset("test").pixels[:5].numpy()):
        Image.fromarray(np.stack([image] * 3, -1)).save(tmp_path / f"{number}.png")
    folder = predict(best, tmp_path / "files", tmp_path / "*.png")
    for ours, theirs in zip(rows(folder / "predictions.csv"), expected[:5], strict=True):
        assert float(ours["probability"]) == pytest.approx(float(theirs["probability"]), abs=2e-6)
        assert ours["class"] == theirs["class"]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders of pictures, with a GIF, an odd name, a file without an ending, and a file that is not an image."""
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
        (["c/bare", "a", "a/1.png"], ["c/bare", "a/1.png", "a/b/2.jpg"]),
        ([os.fsdecode(b"c/caf\xe9.png")], [r"c/caf\xe9.png"]),
        (["a/1.png", "./a", "c/../a/1.png"], ["a/1.png", "./a/b/2.jpg"]),
        (["*/*.png"], ["a/1.png", r"c/caf\xe9.png"]),
        (["**/*.jpg", "[c-d]"], ["a/b/2.jpg", "c/3.gif", r"c/caf\xe9.png"]),
        (["**/b"], ["a/b/2.jpg"]),
        (["a/**"], ["a/1.png", "a/b/2.jpg"]),
        (["./**/*"], ["./a/1.png", "./a/b/2.jpg", "./c/3.gif", r"./c/caf\xe9.png"]),
    ],
)
def test_it_takes_files_folders_and_patterns(folders, paths, expected):
    assert [printable(path) for path in find_images(paths)] == expected


def test_figures_of_runs_below_a_folder_are_not_its_images(folders):
    for name, file in (
        ("a/runs/2026-11-30_21-00-00_test", "summary.json"),
        ("a/2026-11-30_21-00-01_left", "notes.txt"),
    ):
        os.makedirs(name)
        shutil.copy("a/1.png", name)
        open(f"{name}/{file}", "w").close()
    assert find_images(["a"]) == ["a/1.png", "a/2026-11-30_21-00-01_left/1.png", "a/b/2.jpg"]
    assert find_images(["a/runs/2026-11-30_21-00-00_test"]) == ["a/runs/2026-11-30_21-00-00_test/1.png"]


def test_the_file_that_a_path_names_is_read(best, folders):
    """`..` after a symbolic link to a folder means the parent of the link's target, and each file is read once."""
    os.makedirs("far/inner")
    os.symlink("far/inner", "link")
    for name, colour in (("e.png", "red"), ("far/e.png", "blue")):
        Image.new("RGB", (20, 20), colour).save(name)
    given = ["link/../e.png", "e.png", "a/../far/e.png", "far/e.png"]
    folder = predict(best, folders / "runs", *given)
    found = rows(folder / "predictions.csv")
    assert [row.pop("path") for row in found] == ["far/e.png", "e.png"]
    assert found[0] != found[1]
    probability = dict(zip(CLASSES, by_hand(best, "far/e.png", 16).tolist(), strict=True))[found[0]["class"]]
    assert float(found[0]["probability"]) == pytest.approx(probability, abs=2e-6)


def test_paths_that_lead_nowhere(best, folders, fails):
    (folders / "list.csv").write_text("path\na/1.png\n")
    (folders / "c.tar").touch()
    for paths, message in {
        ("c.tar",): "c.tar is an archive, not an image: unpack it and give the folder",
        ("e.jpg",): "no file or folder 'e.jpg'",
        ("*.bmp",): "no image matches the pattern '*.bmp'",
        ("d",): "no image below d",
        ("a", "list.csv"): "list.csv is a list, not an image: give images or folders, or in the place of list.csv for "
        "predict --data ImageListData --data.predict list.csv",
        ("a/1.pgn",): "no file or folder 'a/1.pgn' (did you mean '1.png'?); give image files",
        ("a", str(best)): f"{best} is a model, not an image: give one model at a time, then images or folders",
        ("--root=list.csv",): "list.csv is a list; give it by --data ImageListData and --data.train,",
        ("a", "--root=c"): "--root c and a both name the images: give one of them",
        ("a", "c", "--data=DigitsData"): "--data DigitsData and a (and 1 more) both name the images",
    }.items():
        assert message in fails(["predict", best, *paths, *QUIET])
    assert not (folders / "runs").exists()


class Reversed(ExitStack):
    """Like `os.scandir`, with the entries in the opposite order."""

    def __init__(self, scan, *args):
        super().__init__()
        with scan(*args) as entries:
            self.entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=True))

    def __iter__(self):
        return self.entries

    def __next__(self):
        return next(self.entries)


def test_classes_are_the_checkpoints_whatever_the_folders_are_called(best, photos, tmp_path, monkeypatch):
    """The folders have other names than the classes, in reverse order, but each file gets the same row."""
    root = tmp_path / "photos"
    shutil.copytree(photos / "test", root / "test")
    plain = predict(best, tmp_path / "plain", f"--data.root={root}")
    (root / "test" / "cat").rename(root / "test" / "zebra")
    (root / "test" / "owl").rename(root / "test" / "aardvark")
    listed, scan = os.listdir, os.scandir
    monkeypatch.setattr(os, "scandir", lambda *args: Reversed(scan, *args))
    monkeypatch.setattr(os, "listdir", lambda *args: sorted(listed(*args), reverse=True))
    renamed = predict(best, tmp_path / "renamed", f"--data.root={root}")
    monkeypatch.undo()
    found, expected = rows(renamed / "predictions.csv"), rows(plain / "predictions.csv")
    assert [row["path"] for row in found] == sorted(row["path"] for row in found)
    old = {"zebra": "cat", "aardvark": "owl", "dog": "dog"}
    by_path = {row.pop("path"): row for row in expected}
    for row in found:
        *_, folder, name = row.pop("path").split("/")
        assert row == by_path[f"{root}/test/{old[folder]}/{name}"]


def test_broken_files_are_left_out_listed_and_counted(best, pictures, tmp_path, capsys):
    whole = predict(best, tmp_path / "whole", f"--data.root={pictures}")
    content = (pictures / "some cat.png").read_bytes()
    (pictures / "half.png").write_bytes(content[: len(content) // 2])
    (pictures / "empty.jpg").touch()
    capsys.readouterr()
    folder = predict(best, tmp_path / "runs", f"--data.root={pictures}")
    out = capsys.readouterr().out
    assert f"2 images could not be read and were left out. {folder / 'unreadable.csv'} says why." in out
    assert f"3 predictions in {folder / 'predictions.csv'}" in out
    assert rows(folder / "predictions.csv") == rows(whole / "predictions.csv")
    wanted = (("empty.jpg", "zero bytes"), ("half.png", "broken"))
    listed = [(row["path"], row["reason"]) for row in rows(folder / "unreadable.csv")]
    for (path, reason), (name, words) in zip(listed, wanted, strict=True):
        assert path == f"{pictures}/{name}"
        assert words in reason


def test_a_broken_file_stops_it_where_that_is_asked_for(best, pictures, tmp_path, fails):
    """No table is written, although other images have been classified."""
    (pictures / "text.png").write_text("not an image")
    arguments = ["predict", best, f"--root={pictures}", "--data.on_error=error", "--batch_size=1"]
    message = fails([*arguments, f"--runs={tmp_path / 'runs'}", *QUIET])
    assert f"cannot read image {pictures}/text.png: it is not an image" in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_nothing_can_be_read(best, tmp_path):
    """Only one of two processes reports the error."""
    (tmp_path / "pictures").mkdir()
    for name in "ab":
        (tmp_path / "pictures" / f"{name}.jpg").touch()
    runs = tmp_path / "runs"
    arguments = ["predict", best, f"--data.root={tmp_path / 'pictures'}", f"--runs={runs}", *QUIET]
    ranks = Ranks(arguments, tmp_path, as_torchrun())
    assert max(ranks.finish()) == 2
    folder = only(runs)
    assert ranks.text().count("none of the images could be read") == 1
    assert ranks.text().count(f"{folder / 'unreadable.csv'} says why") == 1
    assert len(rows(folder / "unreadable.csv")) == 2
    assert rows(folder / "predictions.csv") == []


@pytest.mark.slow
@pytest.mark.parametrize("images", [1, 3])
def test_two_processes_write_the_table_of_one(best, pictures, tmp_path, images, monkeypatch):
    """The table of two processes is the same with broken files, and with fewer images than processes."""
    monkeypatch.chdir(tmp_path)
    for path in sorted(pictures.iterdir())[images:]:
        path.unlink()
    # Two images of the first process and one image of the second process are broken.
    for name in ("a.png", "some a.png", "zebra.png") if images > 1 else ():
        (pictures / name).touch()
    one = predict(best, tmp_path / "one", f"--data.root={pictures}")
    arguments = ["predict", best, f"--runs={tmp_path / 'two'}", f"--data.root={pictures}", "--data.batch_size=1"]
    ranks = Ranks([*arguments, *QUIET], tmp_path, as_torchrun())
    assert ranks.finish() == [0, 0], ranks.text()[-3000:]
    made = only(tmp_path / "two")
    assert ranks.text().count(f"{images} prediction{'s' * (images > 1)} in {made / 'predictions.csv'}") == 1
    expected = rows(one / "predictions.csv")
    assert len(expected) == images
    for ours, theirs in zip(rows(made / "predictions.csv"), expected, strict=True):
        for name, value in theirs.items():
            same = pytest.approx(float(value), abs=2e-6) if "probability" in name else value
            assert (float(ours[name]) if "probability" in name else ours[name]) == same
    assert {path.name for path in made.iterdir()} == {path.name for path in one.iterdir()}


def test_names_of_all_bytes_come_into_the_tables(best, pictures, tmp_path):
    odd = [os.fsdecode(b"caf\xe9.png"), 'a, "b"\nc.png']
    for name in odd:
        shutil.copy(pictures / "some cat.png", pictures / name)
    (pictures / os.fsdecode(b"broken\xff.png")).write_bytes(b"")
    folder = predict(best, tmp_path / "runs", f"--data.root={pictures}")
    names = {os.path.basename(row["path"]) for row in rows(folder / "predictions.csv")}
    assert names == {r"caf\xe9.png", 'a, "b"\nc.png', *(f"some {name}.png" for name in CLASSES)}
    (broken,) = rows(folder / "unreadable.csv")
    assert broken["path"] == rf"{pictures}/broken\xff.png"
    assert main(["embed", str(best), f"--root={pictures}", f"--output={tmp_path / 'x.csv'}", "--num_workers=0"]) == 0
    assert rf"{pictures}/caf\xe9.png" in {row["path"] for row in rows(tmp_path / "x.csv")}
    assert [row["path"] for row in rows(tmp_path / "x.unreadable.csv")] == [broken["path"]]


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_maps_of_steps_and_their_means(best, pictures, tmp_path, native):
    kwargs, data = {"halting": "act", "halting_bias": -1, "patch_size": 8}, {"native": native, "patch_size": 8}
    best = write_checkpoint_like(best, tmp_path / "best.ckpt", "test_relvit_universal", kwargs, **data)
    folder = predict(best, tmp_path / "predict", pictures, "--step_maps")
    predictor = load(best)
    for row in rows(folder / "predictions.csv"):
        pixels, _ = next(predictor.batches([row["path"]]))
        (steps,) = predictor.model.step_maps(pixels)
        # An image of 30 x 20 px is resized to at most four patches.
        assert steps.shape == (2, 2)
        assert float(row["steps"]) == pytest.approx(steps.double().mean().item(), abs=1e-4)
        assert (folder / "steps" / row["path"][1:]).with_suffix(".png.png").is_file()


def test_maps_of_steps_need_a_model_that_halts(best, pictures, tmp_path, fails):
    runs = tmp_path / "runs"
    message = fails(["predict", best, pictures, "--step_maps", f"--runs={runs}", *QUIET])
    assert "--step_maps is not for test_relvit: it is for models that halt" in message
    assert not list(runs.glob("*"))


def test_the_parser_gets_one_item_of_long_lists(best, pictures, tmp_path, monkeypatch):
    """For each item of a list, jsonargparse copies the whole list."""
    paths = sorted(pictures.iterdir())
    expected = rows(predict(best, tmp_path / "short", *paths) / "predictions.csv")
    seen, parse = [], Parser.parse_args

    def record(self, args=None, namespace=None, **options):
        if namespace is not None and "data" in namespace:
            given = namespace.data.init_args
            seen.append((len(given.paths), len(given.class_names), len(given.mean)))
        return parse(self, args, namespace, **options)

    monkeypatch.setattr(Parser, "parse_args", record)
    monkeypatch.setattr("relvit.app.cli.trainer.lightning_cli.LONG", 2)
    assert rows(predict(best, tmp_path / "long", *paths) / "predictions.csv") == expected
    assert seen == [(1, 1, 3)]
