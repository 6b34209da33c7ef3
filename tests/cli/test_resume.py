"""`relvit fit --resume RUN`: what it takes, what it refuses, and what it does to the run's folder."""

import shutil
import subprocess
import sys

import pytest
import torch
import yaml

from relvit.cli import main
from relvit.plots import read_metrics
from relvit.training import RunLock, read_checkpoint


@pytest.fixture
def stopped(run, tmp_path):
    """A copy of a run of four epochs."""
    return shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))


def test_goes_on_in_the_same_folder_with_the_same_configuration(stopped, capsys):
    before = yaml.safe_load((stopped / "config.yaml").read_text())
    assert main(["fit", f"--resume={stopped}", "--trainer.max_epochs=6"]) == 0
    assert f"files in {stopped}" in capsys.readouterr().out
    assert [folder.name for folder in stopped.parent.iterdir() if folder.is_dir()] == ["run"]
    assert [epoch for epoch, _ in read_metrics(stopped / "metrics.csv")["train/loss"]] == [0, 1, 2, 3, 4, 5]
    assert read_checkpoint(stopped / "checkpoints" / "last.ckpt")["position"]["epoch"] == 6
    after = yaml.safe_load((stopped / "config.yaml").read_text())
    before["trainer"]["max_epochs"] = 6
    # It names no checkpoint: the configuration alone trains the same from the beginning.
    assert after == before
    assert after["ckpt_path"] is None


def test_a_finished_run_says_so(stopped, capsys):
    assert main(["fit", "--resume", str(stopped)]) == 2
    assert "has reached its 4 epochs: to go on, give --epochs with a larger number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "extra", "message"),
    [
        (lambda run: shutil.rmtree(run), [], "no run at"),
        (lambda run: (run / "config.yaml").unlink(), [], "is no run of relvit fit: it has no config.yaml"),
        (
            lambda run: (run / "checkpoints" / "last.ckpt").unlink(),
            [],
            "go on in a new folder with relvit fit --config",
        ),
        (lambda run: shutil.rmtree(run / "checkpoints"), [], "to go on from: begin again with relvit fit --config"),
        (lambda run: (run / "checkpoints" / "last.ckpt").write_bytes(b"x" * 99), [], "last.ckpt cannot be read"),
        (lambda run: None, ["--ckpt_path=x.ckpt"], "drop --ckpt_path"),
        (lambda run: None, ["--config", "x.yaml"], "drop --config"),
        (lambda run: None, ["--runs=elsewhere"], "drop --runs"),
        (lambda run: None, ["--model.model", "relvit_tiny"], "drop --model.model"),
        (lambda run: None, ["--save_every=0", "--trainer.max_epochs=9"], "save_every must be 1 step or more, got 0"),
        (lambda run: None, ["--trainer.max_epochs=9", "--model.model_kwargs.depth=3"], "was trained with model_kwargs"),
    ],
    ids=[
        "no folder",
        "no configuration",
        "no last checkpoint",
        "no checkpoint",
        "damaged",
        "checkpoint besides",
        "configuration besides",
        "runs besides",
        "architecture besides",
        "never save",
        "other model",
    ],
)
def test_refusals(stopped, spoil, extra, message, capsys):
    """Never a fresh start in place of a resume."""
    spoil(stopped)
    files = {path: path.stat().st_mtime_ns for path in stopped.rglob("*") if path.is_file()}
    assert main(["fit", f"--resume={stopped}", *extra]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_two_processes_never_train_in_one_folder(stopped, capsys):
    script = (
        "import fcntl, sys, time; lock = open(sys.argv[1], 'w'); fcntl.lockf(lock, fcntl.LOCK_EX);"
        "print('ready', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(stopped / RunLock.NAME)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "ready\n"
        assert main(["fit", f"--resume={stopped}", "--trainer.max_epochs=6"]) == 2
        assert "is being trained in by another process" in capsys.readouterr().err
    finally:
        other.kill()
        other.wait()
    # A process that is gone has no lock, however it went.
    RunLock(stopped).release()


def test_checkpoints_hold_everything_that_goes_on(run):
    content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["position"] == {"epoch": 4, "batch": 0, "layout": [3, 8, 1, 1], "validated": False}
    assert content["ImageFolderData"] == {"epoch": 4, "batch": 0}
    rows = content["callbacks"]["History"]["rows"]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    best = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["position"]["validated"] is True
    assert best["position"]["batch"] == 3


@pytest.mark.parametrize("changed", ["--data.batch_size=6", "--trainer.accumulate_grad_batches=2"])
def test_within_an_epoch_batches_stay_what_they_were(run, tmp_path, changed, capsys):
    """Otherwise some images would come twice and others not at all."""
    folder = shutil.copytree(run, tmp_path / "run")
    checkpoint = folder / "checkpoints" / "last.ckpt"
    content = torch.load(checkpoint, weights_only=True)
    content["position"] = {"epoch": 3, "batch": 1, "layout": [3, 8, 1, 1], "validated": False}
    torch.save(content, checkpoint)
    assert main(["fit", f"--resume={folder}", changed]) == 2
    then = "the checkpoint is from within an epoch of 3 batches, 8 images in a batch, 1 batches in an optimiser step, 1"
    assert then in capsys.readouterr().err
    # At an epoch's end they may change.
    content["position"] = {"epoch": 3, "batch": 0, "layout": [3, 8, 1, 1], "validated": False}
    torch.save(content, checkpoint)
    assert main(["fit", f"--resume={folder}", changed]) == 0
