"""Control characters in names of files and classes are printed as escapes; names in all languages work."""

import io
import re
import shutil
import sys

import pytest
from command_line import evaluate, fit, rows
from grey_folders import GREY, make
from photos import TINY
from stored_images import KINDS, grey_files, write

from relvit.app.cli import main
from relvit.app.cli.outputs import print_table
from relvit.app.utils.progress import rank_zero_print, with_bar

ESCAPE = "\x1b]0;title\x07\u202e"
ESCAPED = r"\x1b]0;title\x07\u202e"


def clean(text):
    return not any(character in text for character in "\x1b\x07\u202e")


@pytest.fixture
def hostile(photos, tmp_path):
    """A folder whose file names contain control characters: an image that cannot be read, and one of another format."""
    root = shutil.copytree(photos, tmp_path / "photos")
    for name in (f"{ESCAPE}\nrelvit: all is well.jpg", "a.heic"):
        (root / "train" / "cat" / name).touch()
    return root


def test_names_of_files(hostile, best, tmp_path, capsys, recwarn):
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={hostile}", f"--runs={tmp_path / 'runs'}", *TINY]
    shown = rf"{hostile}/train/cat/{ESCAPED}\nrelvit: all is well.jpg: the file is empty"
    assert main([*arguments, "--trainer.max_epochs=1"]) == 2
    out, err = capsys.readouterr()
    assert f"cannot read image {shown}" in err
    assert clean(out + err)
    assert main(["check-data", str(hostile)]) == 1
    out, err = capsys.readouterr()
    assert f"train: {shown}" in out
    assert clean(out + err)
    folder = evaluate("predict", best, tmp_path / "p", hostile / "train" / "cat")
    out, err = capsys.readouterr()
    assert clean(out + err)
    # The table contains the name unchanged, in quotes.
    (row,) = rows(folder / "unreadable.csv")
    assert row["path"] == f"{hostile}/train/cat/{ESCAPE}\nrelvit: all is well.jpg"


def test_an_output_of_ascii_alone(photos, tmp_path, monkeypatch):
    root = shutil.copytree(photos, tmp_path / "photos")
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict") for _ in range(2)]
    for name, stream in zip(("stdout", "stderr"), streams, strict=True):
        monkeypatch.setattr(sys, name, stream)
    (root / "test" / "cat" / "ca\u00f1on.jpg").touch()
    assert main(["check-data", str(root)]) == 1
    # Trainings print their reports by this function.
    rank_zero_print("accuracy 0.5 \u00b1 0.1")
    monkeypatch.undo()
    streams[0].flush()
    out = streams[0].buffer.getvalue().decode("ascii")
    assert r"test/cat/ca\xf1on.jpg: the file is empty" in out
    assert r"accuracy 0.5 \xb1 0.1" in out


def test_a_terminal_that_is_narrower_than_a_table_breaks_its_lines_and_loses_no_number(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    header, numbers = ["size", *(f"column {i}" for i in range(9))], [f"0.{1234 + i}" for i in range(9)]
    print_table(header, [["1024 x 1024", *numbers], ["a longer name of a class", *numbers]])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-9:] for line in lines if "0.1234" in line] == [numbers] * 2
    assert lines[1].split() == re.findall(r"\w+", " ".join(header))
    assert any(line.startswith(" 1024 x 1024 ") for line in lines)
    for wrap in (False, True):
        print_table(["class", "f1"], [["a name that is far longer than forty columns", "0.1234"]], wrap=wrap)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 40
        assert "\u2026" not in "".join(lines)


def test_a_root_that_is_not_utf8(tmp_path, fails):
    (tmp_path / "caf\udce9").mkdir()
    assert r"caf\xe9 is not UTF-8; rename it" in fails(["fit", "--config=folder", f"--root={tmp_path}/caf\udce9"])


def test_names_of_folders(hostile, tmp_path, capsys):
    root = hostile.rename(tmp_path / f"photos {ESCAPE}")
    assert main(["fit", "--data=ImageFolderData", f"--data.root={root}/none", *TINY]) == 2
    out, err = capsys.readouterr()
    assert f"photos {ESCAPED}/none is not a folder" in err
    assert clean(out + err)


def test_lists(photos, tmp_path, capsys):
    for text, message in {
        f'x.jpg,cat\n"y{ESCAPE}\n.jpg",dog\n': rf"no file {photos}/y{ESCAPED}\n.jpg",
        f'x.jpg,cat\ny.jpg,"{ESCAPE}\n."\n': rf"list.csv: the class name '{ESCAPED}\n.' has control characters; rename",
        f"x.jpg,{ESCAPE},cat\ny.jpg,dog\n": rf"line 2: 3 cells ('x.jpg', '{ESCAPED}', 'cat')",
    }.items():
        (tmp_path / "list.csv").write_text(f"path,label\n{text}")
        arguments = ["fit", "--data=ImageListData", f"--data.train={tmp_path / 'list.csv'}", f"--data.root={photos}"]
        assert main([*arguments, f"--runs={tmp_path / 'runs'}", *TINY]) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert len(err.splitlines()) == 1
        assert clean(out + err)


@pytest.mark.parametrize("kind", KINDS)
def test_archives(kind, tmp_path, capsys):
    files = [(f"{label}{ESCAPE}/{name[4:]}", content, f"{label}{ESCAPE}") for name, content, label in grey_files(2)]
    places = write(kind, tmp_path / "data", {"train": files})
    arguments = [f"--data.{name}={value}" for name, value in places.items()]
    assert main(["fit", "--data=ReaderData", *arguments, f"--runs={tmp_path / 'runs'}", *TINY]) == 2
    out, err = capsys.readouterr()
    assert f"the class name 'ant{ESCAPED}' has control characters; rename it" in err
    assert clean(out + err)


@pytest.mark.slow
def test_honest_names(tmp_path, capsys):
    root = tmp_path / "фото 写真"
    make(root, train=2, val=1, test=1)
    names = dict(zip(GREY, ["gâteau au café", "猫 🐈\u200d⬛", "a b (50 %)"], strict=True))
    for split in ("train", "val", "test"):
        for old, new in names.items():
            (root / split / old).rename(root / split / new)
            (root / split / new / "000.png").rename(root / split / new / f"{new}, \u00e9\u0301.png")
    folder = fit(root, tmp_path / "runs")
    out = capsys.readouterr().out
    assert f"6 training images: {', '.join(f'{name} 2' for name in sorted(names.values()))}" in out
    best = folder / "checkpoints" / "best.ckpt"
    found = rows(evaluate("predict", best, tmp_path / "p", root / "test") / "predictions.csv")
    assert [row["path"] for row in found] == [
        f"{root}/test/{name}/{name}, \u00e9\u0301.png" for name in sorted(names.values())
    ]
    assert {row["class"] for row in found} <= set(names.values())
    assert main(["show", str(best), found[1]["path"], f"--output={tmp_path / 'pictures'}", "--kind=cam"]) == 0
    assert f"{sorted(names.values())[1]}, \u00e9\u0301-cam.png" in capsys.readouterr().out


def test_a_progress_bar_shows_brackets_of_a_name(capsys):
    assert list(with_bar("ab", 2, "runs[lr]: val")) == ["a", "b"]
    assert "runs[lr]: val" in capsys.readouterr().err
