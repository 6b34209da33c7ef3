"""`relvit fit --resume RUN`: the runs and options that it accepts or refuses, and the files that it changes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from command_line import QUIET, fit, only, summary
from processes import is_open
from resumed_runs import weights

from relvit.app.cli import main
from relvit.app.cli.fit.resumed_options import FREE, PLACES
from relvit.app.plots import read_metrics
from relvit.app.training import RunLock, read_checkpoint
from relvit.app.training.checkpoints.file import EPOCH_NAME


def test_goes_on_in_the_same_folder_with_the_same_configuration(run, resumed):
    folder, printed = resumed
    assert f"files in {folder}" in printed
    assert [path.name for path in folder.parent.iterdir()] == ["run"]
    assert [epoch for epoch, _ in read_metrics(folder / "metrics.csv")["train/loss"]] == [0, 1, 2, 3, 4, 5]
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["position"]["epoch"] == 6
    before, after = (yaml.safe_load((each / "config.yaml").read_text()) for each in (run, folder))
    before["trainer"]["max_epochs"] = 6
    # The configuration names no checkpoint, so it repeats the whole training from the beginning.
    assert after == before
    assert after["ckpt_path"] is None


def test_a_new_folder_from_a_checkpoint_that_knows_how_it_was_trained(run, resumed, tmp_path, capsys):
    """Only the Trainer's options have to be given again."""
    last = run / "checkpoints" / "last.ckpt"
    assert main(["fit", f"--ckpt_path={last}", f"--runs={tmp_path / 'new'}", "--trainer.max_epochs=6", *QUIET]) == 0
    out = capsys.readouterr().out
    assert "changed since: trainer.max_epochs 4 -> 6\n" in out
    # The best checkpoint in a new folder is chosen among the epochs of the new folder.
    assert "Best validation accuracy since resuming after epoch 4:" in out
    folder = only(tmp_path / "new")
    assert summary(folder)["best_epoch"] in (5, 6)
    for name in ("lr", "train/loss", "val/loss"):
        assert read_metrics(folder / "metrics.csv")[name] == read_metrics(resumed[0] / "metrics.csv")[name]


def test_a_finished_run_says_so(stopped, fails):
    last = stopped / "checkpoints" / "last.ckpt"
    message = f"the training of {last} has reached its 4 epochs: to go on, give --epochs with a larger number"
    assert message in fails(["fit", "--resume", stopped])
    before = (stopped / "summary.json").read_text()
    message = "has reached its 12 steps: to go on, give --trainer.max_steps with a larger number"
    assert message in fails(["fit", "--resume", stopped, "--epochs", 9, "--trainer.max_steps", 12])
    assert (stopped / "summary.json").read_text() == before


@pytest.mark.parametrize(
    ("spoil", "extra", "message"),
    [
        (lambda run: shutil.rmtree(run), [], "no run at"),
        (lambda run: (run / "config.yaml").unlink(), [], "is not a run of relvit fit, as it has no config.yaml: give"),
        (
            lambda run: (run / "checkpoints" / "last.ckpt").unlink(),
            [],
            "go on in a new folder with relvit fit --config",
        ),
        (lambda run: shutil.rmtree(run / "checkpoints"), [], "to go on from: begin again with relvit fit --config"),
        (lambda run: (run / "checkpoints" / "last.ckpt").write_bytes(b"x" * 99), [], "last.ckpt cannot be read"),
        (lambda run: None, ["--ckpt_path=x.ckpt"], "drop --ckpt_path"),
        (lambda run: None, ["--config", "x.yaml"], "drop --config"),
        (lambda run: None, ["--model.model", "relvit_tiny"], "drop --model.model"),
        (lambda run: None, ["--save_every=0", "--trainer.max_epochs=9"], "--save_every must be 1 or more, got 0"),
        (lambda run: None, ["--trainer.max_epochs=9", "--model.model_kwargs.depth=3"], "was trained with model_kwargs"),
    ],
)
def test_refusals(stopped, spoil, extra, message, fails):
    """A resume that is refused never starts a training from scratch instead."""
    spoil(stopped)
    files = {path: path.stat().st_mtime_ns for path in stopped.rglob("*") if path.is_file()}
    assert message in fails(["fit", f"--resume={stopped}", *extra])
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_a_folder_is_no_checkpoint_to_continue(stopped, fails):
    message = fails(["fit", f"--ckpt_path={stopped}"])
    last = stopped / "checkpoints" / "last.ckpt"
    assert f"is a folder: give a checkpoint in it, such as {last}, or go on in the same folder by --resume" in message


def test_a_run_that_cannot_be_written_to_goes_on_in_a_new_folder(tmp_path, monkeypatch, fails):
    config, last = tmp_path / "config.yaml", tmp_path / "checkpoints" / "last.ckpt"
    last.parent.mkdir()
    for file in (config, last):
        file.touch()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    message = fails(["fit", f"--resume={tmp_path}"])
    assert f"{tmp_path} cannot be written to: go on in a new folder with relvit fit --config {config} " in message
    assert message.rstrip().endswith(f" --ckpt_path {last}")


def test_two_processes_never_train_in_one_folder(stopped, fails):
    script = (
        "import fcntl, sys, time; lock = open(sys.argv[1], 'w'); fcntl.lockf(lock, fcntl.LOCK_EX);"
        "print('ready', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(stopped / RunLock.NAME)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "ready\n"
        message = fails(["fit", f"--resume={stopped}", "--trainer.max_epochs=6"])
        assert "is in use by another training" in message
    finally:
        other.kill()
        other.wait()
    # The lock of a process ends with the process, even if the process was killed.
    RunLock(stopped).release()


def test_a_command_closes_its_lock(stopped, fails):
    assert "has reached its 4 epochs" in fails(["fit", f"--resume={stopped}"])
    assert not is_open(stopped / RunLock.NAME)


def test_checkpoints_hold_everything_that_goes_on(run):
    content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    at_the_end = {"epoch": 4, "batch": 0, "layout": [3, 8, 1, 1], "validated": False, "last": False}
    assert content["position"] == at_the_end
    assert content["ImageFolderData"] == {"epoch": 4, "batch": 0}
    rows = content["callbacks"]["History"]["rows"]
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    best = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    assert best["position"]["validated"] is True
    assert best["position"]["batch"] == 3


@pytest.mark.parametrize("earlier", ["none", "of two epochs"])
def test_a_run_that_lacks_only_its_end_gets_it(stopped, capsys, earlier):
    for name in ("summary.json", "curves.png", "positions.png"):
        (stopped / name).unlink()
    if earlier != "none":
        # A complete training of two epochs was resumed for two more epochs.
        (stopped / "summary.json").write_text('{"epochs": 2, "steps": 6}')
    before = weights(stopped)
    assert main(["fit", f"--resume={stopped}"]) == 0
    assert "The training is complete; its test, figures and summary are left." in capsys.readouterr().out
    assert summary(stopped)["epochs"] == 4
    assert 0 <= summary(stopped)["test/acc1"] <= 1
    for name in ("curves.png", "positions.png"):
        assert (stopped / name).is_file()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(stopped).items())
    assert [epoch for epoch, _ in read_metrics(stopped / "metrics.csv")["train/loss"]] == [0, 1, 2, 3]


def test_patience_ends_a_training_that_learns_nothing_and_may_change(run, photos, tmp_path, capsys):
    """With a learning rate of 0 the model learns nothing, so the first validation is the best."""
    still = ["--model.lr=0", "--model.min_lr=0", "--model.warmup_epochs=0", "--patience=1", "--trainer.max_epochs=9"]
    folder = fit(photos, tmp_path, *still)
    assert len(read_metrics(folder / "metrics.csv")["lr"]) == 2
    assert "Stopped early: patience 1 with val/acc1 has run out." in capsys.readouterr().out
    assert summary(folder)["stopped_early"] is True
    assert "stopped_early" not in summary(run)
    # Early stopping ended the training before its last epoch, so the training can be resumed.
    assert main(["fit", f"--resume={folder}", "--patience=3"]) == 0
    assert len(read_metrics(folder / "metrics.csv")["lr"]) == 4


def test_the_page_names_all_that_may_change():
    page = (Path(__file__).parents[5] / "docs" / "train_your_images.md").read_text()
    writes, resume = (page.split(f"## {title}\n")[1].split("\n## ")[0] for title in ("What a run writes", "Resume"))
    named = {word.removeprefix("--") for word in re.findall(r"`([\w-]+)`", resume)}
    free = {name.rpartition(".")[2] for name in FREE | PLACES if not name.startswith("trainer.")}
    assert free <= named, free - named
    assert EPOCH_NAME in writes
