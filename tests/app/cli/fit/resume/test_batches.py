"""Resumed trainings with another batch size or number of devices: an optimiser step has the same number of images."""

import shutil

import pytest
import torch
from command_line import only, summary
from photos import TINY
from resumed_runs import HALVED, files, weights

from relvit.app.cli import main
from relvit.app.plots import read_metrics
from relvit.app.training import read_checkpoint


@pytest.mark.parametrize("changed", ["--data.batch_size=6", "--trainer.accumulate_grad_batches=2"])
def test_optimiser_steps_stay_what_they_were(run, tmp_path, changed, capsys):
    """With larger or smaller steps, a resumed epoch would repeat or skip images, and the schedule would be wrong."""
    folder = shutil.copytree(run, tmp_path / "run")
    checkpoint = folder / "checkpoints" / "last.ckpt"
    content = torch.load(checkpoint, weights_only=True)
    content["position"] = {"epoch": 3, "batch": 1, "layout": [3, 8, 1, 1], "validated": False}
    torch.save(content, checkpoint)
    before = files(folder)
    assert main(["fit", f"--resume={folder}", changed]) == 2
    then = "the training has optimiser steps of 8 images (batch size x accumulation x devices: 8 x 1 x 1), and these wo"
    out, err = capsys.readouterr()
    assert then in err
    assert ("give --batch_size 4" in err) == ("accumulate" in changed)
    # The command fails before it prints anything about the resumed training.
    assert "changed since" not in out
    assert "files in" not in out
    content["position"] = {"epoch": 3, "batch": 0, "layout": [3, 8, 1, 1], "validated": False}
    torch.save(content, checkpoint)
    before[checkpoint] = checkpoint.read_bytes()
    assert main(["fit", f"--resume={folder}", changed]) == 2
    assert then in capsys.readouterr().err
    assert files(folder) == before


@pytest.fixture(scope="module")
def interrupted(photos, tmp_path_factory):
    """The folder of a training of two epochs that Ctrl-C stopped during the second epoch."""
    runs = tmp_path_factory.mktemp("interrupted")
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={runs}", *TINY]
    assert main([*arguments, "--epochs=2", "--model.ema_decay=0.9", "--trainer.callbacks=failures.Stop"]) == 130
    return only(runs)


def test_an_interrupted_training_has_its_place_and_the_end_of_the_epoch_before(interrupted):
    position = read_checkpoint(interrupted / "checkpoints" / "last.ckpt")["position"]
    assert (position["epoch"], position["batch"]) == (1, 1)
    assert read_checkpoint(interrupted / "checkpoints" / "epoch.ckpt")["position"] == {**position, "batch": 0}


def assert_whole(folder):
    """Check that two epochs are complete, and that the last checkpoint is from the end of an epoch."""
    assert [epoch for epoch, _ in read_metrics(folder / "metrics.csv")["train/loss"]] == [0, 1]
    assert (folder / "checkpoints" / "last.ckpt").samefile(folder / "checkpoints" / "epoch.ckpt")


def test_from_within_an_epoch_other_batches_go_on_at_the_end_of_the_epoch_before(interrupted, tmp_path, capsys):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    assert main(["fit", f"--resume={folder}", *HALVED]) == 0
    assert (
        "goes on from the end of epoch 1 and repeats 1 step; --batch_size 8 --trainer.accumulate_grad_batches 1"
        in capsys.readouterr().out
    )
    assert summary(folder)["effective_batch"] == 8
    assert_whole(folder)


@pytest.mark.slow
def test_with_the_same_batches_the_end_of_an_epoch_is_as_exact_as_the_last_step(interrupted, tmp_path):
    whole, from_end = (shutil.copytree(interrupted, tmp_path / name) for name in ("whole", "from_end"))
    shutil.copy(from_end / "checkpoints" / "epoch.ckpt", from_end / "checkpoints" / "last.ckpt")
    for folder in (whole, from_end):
        assert main(["fit", f"--resume={folder}"]) == 0
        assert_whole(folder)
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(from_end).items())


@pytest.mark.slow
def test_the_end_of_the_epoch_stays_over_a_second_stop_and_without_hard_links(interrupted, tmp_path, monkeypatch):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    at_end = folder / "checkpoints" / "epoch.ckpt"
    before = at_end.read_bytes()

    def stop(self, trainer, *arguments):
        if trainer.global_step == 5:
            raise KeyboardInterrupt

    def unlinked(*names):
        raise OSError("no links here")

    monkeypatch.setattr("failures.Stop.on_train_batch_start", stop)
    monkeypatch.setattr("os.link", unlinked)
    assert main(["fit", f"--resume={folder}"]) == 130
    assert at_end.read_bytes() == before
    monkeypatch.setattr("failures.Stop.on_train_batch_start", lambda *arguments: None)
    assert main(["fit", f"--resume={folder}"]) == 0
    assert at_end.read_bytes() == (folder / "checkpoints" / "last.ckpt").read_bytes()
    assert not at_end.samefile(folder / "checkpoints" / "last.ckpt")


def test_without_the_end_of_an_epoch_the_layout_is_named(interrupted, tmp_path, fails):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    (folder / "checkpoints" / "epoch.ckpt").unlink()
    message = fails(["fit", f"--resume={folder}", *HALVED])
    assert (
        "is from within epoch 2, which must end with the batch size and devices that it began with: give "
        "--batch_size 8 " in message
    )
