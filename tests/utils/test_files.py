"""Paths as tables name them and as checkpoints keep them."""

import os
from pathlib import Path

import pytest

from relvit.utils.files import absolute, canonical_paths, from_here


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


# `link` leads to `far/inner`; there is a.txt in far and here, so that a wrong path opens another file.
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
    # A link is not replaced by what it leads to, which another day may be something else.
    assert ("alias" in found, found.endswith("link/b.txt")) == ("alias" in path, path == "link/b.txt")


def test_an_absolute_path_to_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    (tmp_path / "loop").symlink_to("loop")
    for path in ("none/../a.txt", "a.txt/../a.txt", "loop/../a.txt"):
        with pytest.raises(OSError, match=path):
            Path(absolute(path)).read_text()
    assert absolute("none/a.txt") == f"{tmp_path}/none/a.txt"


def test_spellings_of_one_name(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "a" / "y.png").symlink_to("x.png")
    places = list(canonical_paths(f"{tmp_path}/{path}" for path in ("a/x.png", "a/../a//x.png", "link/x.png")))
    assert set(places) == {f"{tmp_path}/a/x.png"}
    assert list(canonical_paths([f"{tmp_path}/link/y.png"])) == [f"{tmp_path}/a/y.png"]
