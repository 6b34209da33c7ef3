"""A disk that is full or read-only while a run writes: one short error, and no file is lost."""

import re
import subprocess

import pytest
from command_line import QUIET
from failures import DISK, SPARE, fill
from photos import TINY

from relvit.app.cli import main
from relvit.app.training import History, read_checkpoint


@pytest.fixture
def mount(tmp_path):
    """Return a function that mounts a file system in memory, of a given size and options; unmount it at the end."""
    mounted = []

    def make(*options):
        disk = tmp_path / f"disk{len(mounted)}"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", disk]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small tmpfs needs root and mount: {done.stderr.strip()}")
        mounted.append(disk)
        return disk

    yield make
    for disk in mounted:
        subprocess.run(["umount", "-l", disk], check=True)


def fit(photos, runs, *more):
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={runs}", *TINY, *more]
    return main([*arguments, "--trainer.max_epochs=3", "--model.warmup_epochs=0"])


@pytest.mark.parametrize(
    "what", ["checkpoint", *(pytest.param(what, marks=pytest.mark.slow) for what in ("metrics.csv", "tensorboard"))]
)
def test_while_training(photos, mount, monkeypatch, capsys, what):
    disk = mount("size=4m")
    monkeypatch.setenv(DISK, str(disk))
    # There is enough space for the table and the log, but not for a checkpoint.
    monkeypatch.setenv(SPARE, str(40_000 if what == "checkpoint" else 0))
    if what == "tensorboard":
        # The thread of the log raises its error when the next row is written, unless the checkpoint has failed before.
        monkeypatch.setattr(History, "_write_table", lambda self: None)
    assert fit(photos, disk / "runs", "--trainer.callbacks=failures.Fill", "--trainer.logger=tensorboard") == 1
    err = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    (run,) = (disk / "runs").iterdir()
    last = run / "checkpoints" / "last.ckpt"
    assert len(err) == 1
    assert "No space left on device" in err[0]
    assert f"the last complete checkpoint is {last}; make room, then relvit fit --resume {run}" in err[0]
    if what != "tensorboard":
        assert ("cannot write the checkpoint" in err[0]) == (what == "checkpoint")
    assert read_checkpoint(last)["position"]["epoch"] == 1
    assert [path.name for path in run.rglob("*.part")] == []

    monkeypatch.undo()
    (disk / "filler").unlink()
    assert main(["fit", f"--resume={run}"]) == 0
    assert read_checkpoint(last)["position"]["epoch"] == 3


def test_while_predicting(best, photos, mount, tmp_path, fails):
    disk = mount("size=1m")
    fill(disk)
    err = fails(["predict", best, f"--root={photos / 'test'}", f"--runs={disk / 'runs'}", *QUIET], status=1)
    assert "No space left on device: make room, or if " in err
    assert "--debug" not in err
    assert not (disk / "runs").exists()
    assert main(["predict", str(best), f"--root={photos / 'test'}", f"--runs={tmp_path / 'runs'}", *QUIET]) == 0


def test_before_training(photos, mount, capsys):
    disk = mount("size=2m")
    # The model has 0.27 M parameters: 1.1 MB, and twice this size for AdamW's two numbers per parameter.
    assert fit(photos, disk / "runs", "--model.model_kwargs=null") == 1
    err = capsys.readouterr().err
    assert re.search(r"2\.[01] MB are free at ", err)
    assert "a checkpoint of this training takes about 3." in err
    assert "and 3 of them have to fit: make room, or give another folder (--runs)" in err
    assert not (disk / "runs").exists()


def test_where_nothing_can_be_written(photos, mount, tmp_path, capsys):
    disk = mount("size=1m", "ro")
    assert fit(photos, disk / "runs") == 2
    message = f"cannot make a run's folder in {disk / 'runs'}: Read-only file system; give another with --runs"
    assert message in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert fit(photos, tmp_path / "file") == 2
    assert f"cannot make a run's folder in {tmp_path / 'file'}: Not a directory" in capsys.readouterr().err
