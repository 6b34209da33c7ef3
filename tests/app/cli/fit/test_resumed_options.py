"""`relvit fit --resume RUN`: what it takes, what it refuses, and what it does to the run's folder."""

import copy
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from command_line import QUIET, fit, only, summary
from photos import TINY
from processes import Ranks, as_torchrun

from relvit.app.cli import main
from relvit.app.cli.errors import UsageError
from relvit.app.cli.fit.resumed_options import FREE, PLACES, changed_options
from relvit.app.plots import read_metrics
from relvit.app.training import RunLock, read_checkpoint
from relvit.app.training.checkpoints.file import EPOCH_NAME


@pytest.fixture
def stopped(run, tmp_path):
    """A copy of a run of four epochs."""
    return shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))


def test_goes_on_in_the_same_folder_with_the_same_configuration(run, resumed):
    folder, printed = resumed
    assert f"files in {folder}" in printed
    assert [path.name for path in folder.parent.iterdir()] == ["run"]
    assert [epoch for epoch, _ in read_metrics(folder / "metrics.csv")["train/loss"]] == [0, 1, 2, 3, 4, 5]
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["position"]["epoch"] == 6
    before, after = (yaml.safe_load((each / "config.yaml").read_text()) for each in (run, folder))
    before["trainer"]["max_epochs"] = 6
    # It names no checkpoint: the configuration alone trains the same from the beginning.
    assert after == before
    assert after["ckpt_path"] is None


def test_a_new_folder_from_a_checkpoint_that_knows_how_it_was_trained(run, resumed, tmp_path, capsys):
    """No option has to be given again, but for the Trainer's."""
    last = run / "checkpoints" / "last.ckpt"
    assert main(["fit", f"--ckpt_path={last}", f"--runs={tmp_path / 'new'}", "--trainer.max_epochs=6", *QUIET]) == 0
    out = capsys.readouterr().out
    assert "changed since: trainer.max_epochs 4 -> 6\n" in out
    # The best checkpoint of another folder is of that folder's own epochs.
    assert "Best validation accuracy since resuming after epoch 4:" in out
    folder = only(tmp_path / "new")
    assert summary(folder)["best_epoch"] in (5, 6)
    for name in ("lr", "train/loss", "val/loss"):
        assert read_metrics(folder / "metrics.csv")[name] == read_metrics(resumed[0] / "metrics.csv")[name]


def test_a_finished_run_says_so(stopped, fails):
    last = stopped / "checkpoints" / "last.ckpt"
    message = f"the training of {last} has reached its 4 epochs: to go on, give --epochs with a larger number"
    assert message in fails(["fit", "--resume", stopped])


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
        (lambda run: None, ["--model.model", "relvit_tiny"], "drop --model.model"),
        (lambda run: None, ["--save_every=0", "--trainer.max_epochs=9"], "--save_every must be 1 or more, got 0"),
        (lambda run: None, ["--trainer.max_epochs=9", "--model.model_kwargs.depth=3"], "was trained with model_kwargs"),
    ],
)
def test_refusals(stopped, spoil, extra, message, fails):
    """Never a fresh start in place of a resume."""
    spoil(stopped)
    files = {path: path.stat().st_mtime_ns for path in stopped.rglob("*") if path.is_file()}
    assert message in fails(["fit", f"--resume={stopped}", *extra])
    assert {path: path.stat().st_mtime_ns for path in files} == files


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
        assert "is being trained in by another process" in message
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


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != RunLock.NAME}


@pytest.mark.parametrize("changed", ["--data.batch_size=6", "--trainer.accumulate_grad_batches=2"])
def test_optimiser_steps_stay_what_they_were(run, tmp_path, changed, capsys):
    """Otherwise some images would come twice and others not at all, and the schedule would not know where it is."""
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
    # Nothing was announced before.
    assert "changed since" not in out
    assert "files in" not in out
    content["position"] = {"epoch": 3, "batch": 0, "layout": [3, 8, 1, 1], "validated": False}
    torch.save(content, checkpoint)
    before[checkpoint] = checkpoint.read_bytes()
    assert main(["fit", f"--resume={folder}", changed]) == 2
    assert then in capsys.readouterr().err
    assert files(folder) == before


HALVED = ["--data.batch_size=4", "--trainer.accumulate_grad_batches=2"]


@pytest.fixture(scope="module")
def interrupted(photos, tmp_path_factory):
    """The folder of a training of two epochs that Ctrl-C stopped within the second."""
    runs = tmp_path_factory.mktemp("interrupted")
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={runs}", *TINY]
    assert main([*arguments, "--epochs=2", "--model.ema_decay=0.9", "--trainer.callbacks=failures.Stop"]) == 130
    return only(runs)


def weights(folder):
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


def test_from_within_an_epoch_other_batches_go_on_at_the_end_of_the_epoch_before(interrupted, tmp_path, capsys):
    position = read_checkpoint(interrupted / "checkpoints" / "last.ckpt")["position"]
    assert (position["epoch"], position["batch"]) == (1, 1)
    at_end = interrupted / "checkpoints" / "epoch.ckpt"
    assert read_checkpoint(at_end)["position"] == {**position, "batch": 0}
    whole, other, from_end = (shutil.copytree(interrupted, tmp_path / name) for name in ("whole", "other", "from_end"))
    assert main(["fit", f"--resume={whole}"]) == 0
    capsys.readouterr()
    assert main(["fit", f"--resume={other}", *HALVED]) == 0
    out = capsys.readouterr().out
    assert (
        "goes on from the end of epoch 1 and repeats 1 steps; --batch_size 8 --trainer.accumulate_grad_batches 1" in out
    )
    # On the same layout epoch.ckpt is as exact as last.ckpt: all three end with the weights of one training.
    shutil.copy(at_end, from_end / "checkpoints" / "last.ckpt")
    assert main(["fit", f"--resume={from_end}"]) == 0
    expected = weights(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(from_end).items())
    for folder in (whole, other, from_end):
        assert [epoch for epoch, _ in read_metrics(folder / "metrics.csv")["train/loss"]] == [0, 1]
        last, end = (folder / "checkpoints" / name for name in ("last.ckpt", "epoch.ckpt"))
        assert last.samefile(end)
    assert summary(other)["effective_batch"] == 8


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
    assert "is from within epoch 2, where batch and devices stay: give --batch_size 8 " in message


def test_a_run_that_lacks_only_its_end_gets_it(stopped, capsys):
    for name in ("summary.json", "curves.png", "positions.png"):
        (stopped / name).unlink()
    before = weights(stopped)
    assert main(["fit", f"--resume={stopped}"]) == 0
    assert "The training is complete; its test, figures and summary are left." in capsys.readouterr().out
    assert summary(stopped)["epochs"] == 4
    assert 0 <= summary(stopped)["test/acc1"] <= 1
    for name in ("curves.png", "positions.png"):
        assert (stopped / name).is_file()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(stopped).items())
    assert [epoch for epoch, _ in read_metrics(stopped / "metrics.csv")["train/loss"]] == [0, 1, 2, 3]


REFUSED = [
    ("model.lr", "0.02", "0.005"),
    ("model.opt_kwargs.eps", "1e-6", "null"),
    ("data.mean", "[0.5,0.5,0.5]", "[0.485, 0.456, 0.406]"),
    ("seed_everything", "1", "0"),
    ("trainer.callbacks", "LearningRateMonitor", "null"),
    ("trainer.fast_dev_run", "true", "False"),
]


@pytest.mark.parametrize(("name", "value", "before"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_what_is_trained_does_not_change(name, value, before, run, capsys):
    before_files = files(run)
    last = run / "checkpoints" / "last.ckpt"
    assert main(["fit", f"--resume={run}", f"--{name}={value}", "--trainer.max_epochs=9"]) == 2
    out, err = capsys.readouterr()
    message = " ".join(err.split())
    assert f"{last} was trained with --{name} {before}, not " in message
    assert "drop that option, or start another training from these weights with --model.pretrained" in message
    assert "files in" not in out
    assert files(run) == before_files


def test_of_other_options_the_comparison_alone(run):
    content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["relvit"]
    trained = {"model": content["model"], "data": content["data"]} | content["fit"]
    assert changed_options("x.ckpt", trained, copy.deepcopy(trained), []) == []
    values = {"model.weight_decay": 0.1, "model.warmup_epochs": 2, "model.label_smoothing": 0, "model.mixup": 0.2}
    values |= {"model.ema_decay": 0.9, "model.lr_base_batch": 16, "model.opt": "sgd", "model.layer_decay": 0.5}
    values |= {"model.min_lr": 0.0, "model.class_weights": [1, 2, 3], "model.freeze_epochs": 9}
    values["model.position_lr_scale"] = 10.0
    values |= {"model.teacher": "x.ckpt", "data.augment": "none", "data.val_fraction": 0.5, "data.repeats": 2}
    values |= {"trainer.limit_train_batches": 2, "trainer.gradient_clip_val": 1}
    for name, value in values.items():
        asked, (group, option) = copy.deepcopy(trained), name.split(".")
        options = asked[group]["init_args"] if group == "data" else asked[group]
        assert options[option] != value
        options[option] = value
        with pytest.raises(UsageError, match=rf"x.ckpt was trained with --{name} .*, not .*; give --{name}"):
            changed_options("x.ckpt", trained, asked, [])


def test_nor_does_it_in_another_folder(run, tmp_path, fails):
    last = run / "checkpoints" / "last.ckpt"
    arguments = ["fit", f"--ckpt_path={last}", f"--runs={tmp_path}", "--model.lr=0.02", "--trainer.max_epochs=9"]
    assert f"{last} was trained with --model.lr 0.005, not 0.02" in fails(arguments)
    assert not list(tmp_path.iterdir())


def test_an_option_that_the_configuration_changed_is_found_as_well(stopped, fails):
    config = stopped / "config.yaml"
    config.write_text(config.read_text().replace("label_smoothing: 0.1", "label_smoothing: 0.2"))
    message = fails(["fit", f"--resume={stopped}", "--trainer.max_epochs=9"])
    assert "was trained with --model.label_smoothing 0.1, not 0.2" in message
    assert "give --model.label_smoothing 0.1, or start another" in message


def test_what_may_change_takes_effect_and_is_printed(stopped, resumed, photos, tmp_path, capsys):
    """From an epoch's end on, smaller batches may make the same steps."""
    moved = shutil.copytree(photos, tmp_path / "moved")
    options = {
        "trainer.max_epochs": "6",
        "trainer.precision": "bf16-mixed",
        "trainer.logger": "CSVLogger",
        "trainer.logger.save_dir": str(tmp_path / "log"),
        "data.root": str(moved),
        "data.num_workers": "1",
        "model.nonfinite": "skip",
        "save_every": "2",
        # As before: no change.
        "model.lr": "0.005",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    assert main(["fit", f"--resume={stopped}", *arguments, *HALVED]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since: "))
    for change in (
        f"data.root {photos} -> {moved}",
        "data.num_workers 0 -> 1",
        "trainer.max_epochs 4 -> 6",
        "trainer.precision null -> bf16-mixed",
        "model.nonfinite stop -> skip",
        "save_every null -> 2",
        "data.batch_size 8 -> 4",
        "trainer.accumulate_grad_batches 1 -> 2",
    ):
        assert change in line
    assert "model.lr" not in line
    assert summary(stopped)["effective_batch"] == 8
    columns = read_metrics(stopped / "metrics.csv")
    assert columns["lr"] == read_metrics(resumed[0] / "metrics.csv")["lr"]
    # Three steps an epoch: the cosine now ends after 18.
    for epoch, rate in columns["lr"][4:]:
        # After the epoch's last step the schedule is at the next one.
        step = 3 * (epoch + 1) - 3
        assert rate == pytest.approx(1e-5 + (5e-3 - 1e-5) * (1 + math.cos(math.pi * step / 15)) / 2)
    assert columns["train/skipped_steps"] == [(4, 0), (5, 0)]
    assert list((tmp_path / "log").rglob("metrics.csv"))
    first, second = json.loads((stopped / "run.json").read_text())["sessions"]
    assert (first["devices"]["precision"], second["devices"]["precision"]) == ("32-true", "bf16-mixed")
    content = torch.load(stopped / "checkpoints" / "last.ckpt", weights_only=True)["relvit"]
    assert content["data"]["init_args"]["root"] == str(moved)
    assert content["fit"]["trainer"]["max_epochs"] == 6


@pytest.fixture
def moved(stopped, photos, tmp_path):
    """The images of the run in another folder, and the arguments of a resume there."""
    root = shutil.copytree(photos, tmp_path / "moved")
    return root, ["fit", f"--resume={stopped}", "--trainer.max_epochs=5", f"--data.root={root}"]


def swap(root):
    """Two images between two classes."""
    one, other = root / "train" / "cat" / "1.jpg", root / "train" / "dog" / "1.jpg"
    assert one.stat().st_size != other.stat().st_size
    for old, new in ((one, root / "x"), (other, one), (root / "x", other)):
        old.rename(new)


def test_the_images_stay_the_same(stopped, moved, capsys):
    root, arguments = moved
    swap(root)
    (root / "val" / "owl" / "0.jpg").unlink()
    # Those of test may change: they take no part in the training.
    (root / "test" / "owl" / "0.jpg").unlink()
    before = files(stopped)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (
        "the checkpoint is from a training on other images (train: 2 of another size ('cat/1.jpg', 'dog/1.jpg'); val: "
        "1 removed ('owl/0.jpg')): go on with the same images, in whatever folder, or start another training from "
        "these weights with --model.pretrained"
    ) in err
    assert "changed since" not in out
    assert files(stopped) == before
    # Likewise in another run's folder, which then stays away.
    arguments[1] = f"--ckpt_path={stopped / 'checkpoints' / 'last.ckpt'}"
    assert main([*arguments, f"--runs={root / 'runs'}", *QUIET]) == 2
    assert "train: 2 of another size ('cat/1.jpg', 'dog/1.jpg'); val: 1 removed" in capsys.readouterr().err
    assert not (root / "runs").exists()


UNKNOWN = "the checkpoint does not say which images its training had"


def forget_images(run, layout=None):
    """As a Trainer of one's own writes checkpoints."""
    last = run / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    assert content["callbacks"].pop("DataRecord")["images"]["train"]["images"] == 18
    content["position"]["layout"] = layout or content["position"]["layout"]
    torch.save(content, last)
    (run / "images.csv.gz").unlink()


def test_images_that_no_checkpoint_knows_are_warned_of_once(stopped, moved, recwarn, capsys):
    """The training goes on to a limit of steps, in the middle of the fifth epoch, which has three."""
    root, arguments = moved
    forget_images(stopped)
    arguments[2] = "--trainer.max_epochs=-1"
    assert main([*arguments, "--trainer.max_steps=14"]) == 0
    assert torch.load(stopped / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 14
    assert [str(warning.message)[: len(UNKNOWN)] for warning in recwarn].count(UNKNOWN) == 1
    recwarn.clear()
    # Now they are known.
    swap(root)
    assert main([*arguments, "--trainer.max_steps=15"]) == 2
    assert "train: 2 of another size" in capsys.readouterr().err
    assert not [warning for warning in recwarn if UNKNOWN in str(warning.message)]


@pytest.mark.slow
def test_two_processes_compare_the_images_once(stopped, moved, tmp_path):
    root, arguments = moved
    forget_images(stopped, layout=[2, 4, 1, 2])
    arguments += ["--data.batch_size=4", "--trainer.devices=auto", *QUIET]
    ranks = Ranks(arguments, tmp_path, as_torchrun())
    assert ranks.finish() == [0, 0], ranks.text()[-3000:]
    assert ranks.text().count(UNKNOWN) == 1
    swap(root)
    arguments[2] = "--trainer.max_epochs=6"
    ranks = Ranks(arguments, tmp_path, as_torchrun())
    assert ranks.finish() == [2, 2], ranks.text()[-3000:]
    assert "train: 2 of another size ('cat/1.jpg', 'dog/1.jpg')" in ranks.text()


def test_patience_ends_a_training_that_learns_nothing_and_may_change(run, photos, tmp_path, capsys):
    """Nothing is learnt: the first validation is the best."""
    still = ["--model.lr=0", "--model.min_lr=0", "--model.warmup_epochs=0", "--patience=1", "--trainer.max_epochs=9"]
    folder = fit(photos, tmp_path, *still)
    assert len(read_metrics(folder / "metrics.csv")["lr"]) == 2
    assert "Stopped early: patience 1 with val/acc1 has run out." in capsys.readouterr().out
    assert summary(folder)["stopped_early"] is True
    assert "stopped_early" not in summary(run)
    # What it stopped at is no end.
    assert main(["fit", f"--resume={folder}", "--patience=3"]) == 0
    assert len(read_metrics(folder / "metrics.csv")["lr"]) == 4


def test_the_page_names_all_that_may_change():
    page = (Path(__file__).parents[4] / "docs" / "train_your_images.md").read_text()
    writes, resume = (page.split(f"## {title}\n")[1].split("\n## ")[0] for title in ("What a run writes", "Resume"))
    named = {word.removeprefix("--") for word in re.findall(r"`([\w-]+)`", resume)}
    free = {name.rpartition(".")[2] for name in FREE | PLACES if not name.startswith("trainer.")}
    assert free <= named, free - named
    assert EPOCH_NAME in writes
