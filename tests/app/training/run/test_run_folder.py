"""Runs' folders: names, and network file systems without locks or with open files that stay."""

import errno
import os
from datetime import datetime
from types import SimpleNamespace

import pytest
from small_training import build

from relvit.app.cli.trainer.command_folder import new_folder
from relvit.app.training import History, RunLock, Telemetry, new_run_folder


def test_two_runs_never_share_a_folder(tmp_path):
    now = datetime(2026, 1, 2, 3, 4, 5)
    folders = [new_run_folder(tmp_path / "runs", "relvit_tiny", now) for _ in range(3)]
    assert [folder.name for folder in folders] == [
        "2026-01-02_03-04-05_relvit_tiny",
        "2026-01-02_03-04-05_relvit_tiny_2",
        "2026-01-02_03-04-05_relvit_tiny_3",
    ]
    assert all(folder.is_dir() for folder in folders)


def test_a_folder_of_a_configuration_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with new_folder("~/runs", "relvit_tiny") as folder:
        assert folder.parent == tmp_path / "runs"


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.lockf", no_locks)
    with pytest.warns(UserWarning, match=r"has no locks \(Function not implemented\): start no second training in it"):
        RunLock(tmp_path).release()


@pytest.fixture
def nfs(monkeypatch):
    """Let folders stay as on NFS, where a removed file that is still open gets another name in its folder."""

    def not_empty(path, *_, **__):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    monkeypatch.setattr("os.rmdir", not_empty)


@pytest.mark.usefixtures("nfs")
def test_a_folder_that_stays_does_not_hide_the_error_of_the_run(tmp_path):
    def run():
        with new_folder(str(tmp_path), "relvit_tiny") as folder:
            (folder / RunLock.NAME).touch()
            raise ValueError("wrong option")

    with pytest.raises(ValueError, match="wrong option"):
        run()
    assert list(tmp_path.rglob(RunLock.NAME)) == []


@pytest.mark.usefixtures("nfs")
def test_a_log_that_tensorboard_reads_is_written_again(tmp_path):
    log = tmp_path / "tensorboard"
    log.mkdir()
    (log / "events.out.tfevents.1").touch()
    history = History(tmp_path, Telemetry())
    history.on_fit_start(SimpleNamespace(is_global_zero=True), build())
    assert not (log / "events.out.tfevents.1").exists()
    history.on_exception(None, None, KeyboardInterrupt())
    assert len(list(log.iterdir())) == 1
