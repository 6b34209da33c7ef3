"""Paths as tables name them."""

import pytest

from relvit.utils.files import from_here


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
