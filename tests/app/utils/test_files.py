"""Paths as tables and checkpoints contain them; folders that are replaced in one step."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from relvit.app.cli.commands.show import show
from relvit.app.cli.outputs import output_files
from relvit.app.evaluation.deploy import publish_model
from relvit.app.evaluation.standard_error import plus_minus
from relvit.app.utils.files import (
    absolute,
    atomic_folder,
    atomic_write,
    canonical_paths,
    check_output,
    from_here,
    link_or_copy,
    write_csv,
    write_json,
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b.png", "a/b.png"),
        ("./a//b.png", "a/b.png"),
        ("{here}/a/b.png", "a/b.png"),
        ("../c.png", "{above}/c.png"),
        ("{here}2/c.png", "{here}2/c.png"),
        ("caf\udce9.png", "caf\udce9.png"),
    ],
)
def test_one_name_for_one_file(path, expected, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    places = {"here": tmp_path / "here", "above": tmp_path}
    assert from_here(path.format(**places)) == expected.format(**places)


# `link` leads to `far/inner`. There is an a.txt in `far` and one in the current folder, so a wrong path opens another
# file.
SAME = ["a.txt", "./a.txt", "link/../a.txt", "{here}/link/../a.txt", "far/inner/../a.txt", "far/../a.txt", "link/b.txt"]
SAME += ["alias.txt", "link/.././inner//b.txt", "../here/a.txt", "~/a.txt"]


@pytest.mark.parametrize("path", SAME)
def test_an_absolute_path_is_of_the_same_file(path, tmp_path, monkeypatch):
    here = tmp_path / "here"
    for name in ("a.txt", "far/a.txt", "far/inner/b.txt"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    (here / "link").symlink_to("far/inner")
    (here / "alias.txt").symlink_to("link/b.txt")
    monkeypatch.chdir(here)
    (here / "~").mkdir()
    (here / "~" / "a.txt").write_text("no user's home")
    path = path.format(here=here)
    found = absolute(path)
    assert os.path.isabs(found)
    assert ".." not in Path(found).parts
    assert Path(found).read_text() == Path(path).read_text()
    assert Path(from_here(path)).read_text() == Path(found).read_text()
    # A link is kept in the path, because it may lead to another target later.
    assert ("alias" in found, found.endswith("link/b.txt")) == ("alias" in path, path == "link/b.txt")


def test_an_absolute_path_to_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    (tmp_path / "loop").symlink_to("loop")
    for path in ("none/../a.txt", "a.txt/../a.txt", "loop/../a.txt"):
        with pytest.raises(OSError, match=path):
            Path(absolute(path)).read_text()
    assert absolute("none/a.txt") == f"{tmp_path}/none/a.txt"
    assert absolute("https://host/a.txt") == "https://host/a.txt"


def test_spellings_of_one_name(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "a" / "y.png").symlink_to("x.png")
    places = list(canonical_paths(f"{tmp_path}/{path}" for path in ("a/x.png", "a/../a//x.png", "link/x.png")))
    assert set(places) == {f"{tmp_path}/a/x.png"}
    assert list(canonical_paths([f"{tmp_path}/link/y.png"])) == [f"{tmp_path}/a/y.png"]


def _replace_folder(folder, kill_at):
    """Replace a published folder, and kill this process at one of the system calls."""
    count = 0

    def kill(event, arguments):
        nonlocal count
        if event.startswith(("os.", "open", "shutil.", "ctypes.call")):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    with atomic_folder(folder) as part:
        for name in ("weights", "card"):
            (part / name).write_text("new")


@pytest.mark.slow
def test_wherever_the_process_is_killed_a_folder_has_the_old_files_or_the_new_ones(tmp_path):
    folder, found, count = tmp_path / "folder", [], 0
    context = multiprocessing.get_context("fork")
    while found[-1:] != [("new", 0)]:
        shutil.rmtree(folder, ignore_errors=True)
        (folder / ".git").mkdir(parents=True)
        (folder / ".git" / "HEAD").write_text("main")
        for name in ("weights", "card"):
            (folder / name).write_text("old")
        count += 1
        process = context.Process(target=_replace_folder, args=(folder, count))
        process.start()
        process.join()
        # Files with other names stay in the folder.
        assert (folder / ".git" / "HEAD").read_text() == "main"
        (content,) = {(folder / name).read_text() for name in ("weights", "card")}
        found.append((content, process.exitcode))
    assert {("old", -signal.SIGKILL), ("new", -signal.SIGKILL)} <= {*found}
    # A process that is not killed leaves no temporary files beside the folder.
    assert len(list(tmp_path.glob(".*"))) < count


def test_the_folder_of_a_file_is_made(tmp_path):
    write_json(tmp_path / "a" / "b" / "report.json", [1])
    assert json.loads((tmp_path / "a" / "b" / "report.json").read_text()) == [1]


def test_a_table_is_written_row_by_row(tmp_path):
    """The texts of all rows would take many times the memory of the numbers that they are made of."""

    class Row(list):
        pass

    def rows():
        for number in range(3):
            row = Row([number])
            before = weakref.ref(row)
            yield row
            del row
            assert before() is None

    write_csv(tmp_path / "table.csv", ["number"], rows())
    assert (tmp_path / "table.csv").read_text().split() == ["number", "0", "1", "2"]


def test_json_has_null_for_numbers_that_are_not_finite(tmp_path):
    values = {"val/map": float("nan"), "rows": [(np.float64("inf"), 1, True, None, "NaN")]}
    write_json(tmp_path / "a.json", values)
    expected = {"val/map": None, "rows": [[None, 1, True, None, "NaN"]]}
    assert json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail) == expected
    # The model card shows nan for both.
    assert plus_minus(expected, "val/map") == plus_minus(values, "val/map") == "nan"


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_work(tmp_path, monkeypatch):
    output = tmp_path / "new" / "a.csv"
    check_output(output, (".csv",))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for check in (
        lambda: check_output(output, (".csv",)),
        lambda: output_files(str(tmp_path), "a"),
        lambda: output_files(str(tmp_path / "new"), "a"),
        lambda: show("missing.ckpt", output=str(tmp_path / "new" / "pictures")),
        lambda: publish_model("missing.ckpt", tmp_path / "model"),
    ):
        with pytest.raises(PermissionError, match=f"the folder {tmp_path} cannot be written to: give a"):
            check()
    assert not list(tmp_path.iterdir())


def test_processes_of_the_same_number_write_the_same_file_or_folder(tmp_path):
    """Processes in containers, or on machines that share a disk, may have equal numbers; here it is one process."""
    with atomic_write(tmp_path / "file") as one, atomic_folder(tmp_path / "folder") as first:
        one.write_text("one")
        (first / "one").touch()
        with atomic_write(tmp_path / "file") as two, atomic_folder(tmp_path / "folder") as second:
            two.write_text("two")
            (second / "two").touch()
        assert (tmp_path / "file").read_text() == "two"
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["two"]
    assert (tmp_path / "file").read_text() == "one"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "one", "two"]


def test_a_system_that_cannot_exchange_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "folder") as part:
            (part / text).write_text(text)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "new", "old"]
    monkeypatch.chdir(tmp_path / "folder")
    with pytest.raises(ValueError, match="is the current folder or a mount point"), atomic_folder("."):
        pass


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path):
    last, kept = tmp_path / "last.ckpt", tmp_path / "epoch.ckpt"
    last.symlink_to("disk/last.ckpt")
    for text in ("first", "second"):
        with atomic_write(last) as part:
            part.write_text(text)
        if text == "first":
            link_or_copy(last, kept)
    assert (tmp_path / "disk" / "last.ckpt").read_text() == "second"
    assert (last.is_symlink(), kept.read_text()) == (True, "first")
    assert len(list(tmp_path.rglob("*"))) == 4


def test_a_second_link_to_the_same_content_leaves_no_other_file(tmp_path):
    first, second = tmp_path / "last.ckpt", tmp_path / "epoch.ckpt"
    first.write_text("content")
    for _ in range(2):
        link_or_copy(first, second)
    assert sorted(tmp_path.iterdir()) == [second, first]
    assert second.read_text() == "content"
