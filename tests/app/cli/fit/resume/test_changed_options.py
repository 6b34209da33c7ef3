"""Options that may change when a training is resumed, and options that may not."""

import contextlib
import copy
import io
import json
import math
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from command_line import summary
from resumed_runs import HALVED, files

from relvit.app.cli import main
from relvit.app.cli.errors import UsageError
from relvit.app.cli.fit.resumed_options import changed_options
from relvit.app.plots import read_metrics

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


class Changed(NamedTuple):
    """A training that was resumed from four epochs to six with other options."""

    folder: Path
    images: Path
    log: Path
    printed: str


@pytest.fixture(scope="module")
def changed(run, photos, tmp_path_factory):
    place = tmp_path_factory.mktemp("changed")
    folder = shutil.copytree(run, place / "run", ignore=shutil.ignore_patterns(".lock"))
    images, log = shutil.copytree(photos, place / "moved"), place / "log"
    options = {
        "trainer.max_epochs": "6",
        "trainer.precision": "bf16-mixed",
        "trainer.logger": "CSVLogger",
        "trainer.logger.save_dir": str(log),
        "data.root": str(images),
        "data.num_workers": "1",
        "model.nonfinite": "skip",
        "save_every": "2",
        # This option has its old value, so it must not be reported as changed.
        "model.lr": "0.005",
    }
    arguments, printed = [f"--{name}={value}" for name, value in options.items()], io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["fit", f"--resume={folder}", *arguments, *HALVED]) == 0
    return Changed(folder, images, log, printed.getvalue())


def test_what_may_change_is_printed(changed, photos):
    line = next(line for line in changed.printed.splitlines() if line.startswith("changed since: "))
    for change in (
        f"data.root {photos} -> {changed.images}",
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


def test_from_the_end_of_an_epoch_smaller_batches_make_the_same_steps(changed):
    assert summary(changed.folder)["effective_batch"] == 8


def test_a_larger_number_of_epochs_lengthens_the_schedule(changed, resumed):
    rates = read_metrics(changed.folder / "metrics.csv")["lr"]
    assert rates == read_metrics(resumed[0] / "metrics.csv")["lr"]
    # An epoch has three steps, so the cosine now ends after 18 steps.
    for epoch, rate in rates[4:]:
        # `lr` is logged after the last step of an epoch, when the schedule is already at the next step.
        step = 3 * (epoch + 1) - 3
        assert rate == pytest.approx(1e-5 + (5e-3 - 1e-5) * (1 + math.cos(math.pi * step / 15)) / 2)


def test_another_logger_another_precision_and_skipped_steps_take_effect(changed):
    assert read_metrics(changed.folder / "metrics.csv")["train/skipped_steps"] == [(4, 0), (5, 0)]
    assert list(changed.log.rglob("metrics.csv"))
    first, second = json.loads((changed.folder / "run.json").read_text())["sessions"]
    assert (first["devices"]["precision"], second["devices"]["precision"]) == ("32-true", "bf16-mixed")


def test_the_checkpoint_records_what_changed(changed):
    content = torch.load(changed.folder / "checkpoints" / "last.ckpt", weights_only=True)["relvit"]
    assert content["data"]["init_args"]["root"] == str(changed.images)
    assert content["fit"]["trainer"]["max_epochs"] == 6
