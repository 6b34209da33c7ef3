"""Checkpoints are written atomically."""

import os
import pickle
import resource

import pytest
import torch

from relvit.training import write_checkpoint

OLD, NEW = {"weights": torch.arange(3.0)}, {"weights": torch.arange(5.0), "epoch": 2}


def same(path, expected):
    found = torch.load(path, weights_only=True)
    assert set(found) == set(expected)
    assert torch.equal(found["weights"], expected["weights"])


def test_a_new_one_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "x.ckpt"
    for content in (OLD, NEW):
        write_checkpoint(content, path)
        same(path, content)
    assert os.listdir(tmp_path) == ["x.ckpt"]
    # Readable by others, as any file that is simply opened.
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("reached", ["half of the content", "the disk", "the new name"])
def test_whatever_fails_the_old_one_stays_and_nothing_else(reached, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    path, content, error = tmp_path / "x.ckpt", dict(NEW), KeyboardInterrupt
    write_checkpoint(OLD, path)
    if reached == "half of the content":
        content["hook"], error = lambda: None, (AttributeError, pickle.PicklingError)
    else:
        monkeypatch.setattr(os, "fsync" if reached == "the disk" else "replace", fail)
    with pytest.raises(error):
        write_checkpoint(content, path)
    same(path, OLD)
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_a_full_disk_is_called_one(tmp_path):
    path = tmp_path / "x.ckpt"
    write_checkpoint(OLD, path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system's stand-in for it: no file may grow beyond a megabyte.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_checkpoint({"weights": torch.zeros(2**20)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    same(path, OLD)
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        write_checkpoint(NEW, tmp_path / "none" / "x.ckpt")
