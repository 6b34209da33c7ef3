"""A working directory with the files that the documentation mentions."""

import shutil
from pathlib import Path

import pytest
from trained_runs import best, photos, run

__all__ = ["best", "photos", "run"]


@pytest.fixture
def place(best, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("best", "a", "b"):
        shutil.copy(best, f"{name}.ckpt")
    shutil.copytree(photos, "photos")
    shutil.copytree(photos / "test", "folder/of/images")
    labels = {"cat": "cat;dog", "dog": "dog", "owl": ""}
    rows = [f"{path},{labels[path.parent.name]}" for path in Path("photos/train").rglob("*.jpg")]
    Path("train.csv").write_text("\n".join(["path,label", *rows]))
    shutil.copy("train.csv", "test.csv")
    for name in ("photo.jpg", "other.png"):
        shutil.copy("photos/test/owl/0.jpg", name)
    return tmp_path
