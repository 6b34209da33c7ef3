"""Every callback of Lightning and every argument of its Trainer: a run with it trains, resumes and keeps its schedule,
or it is refused in one line before the training starts."""

import inspect
import math
from pathlib import Path

import lightning.pytorch.callbacks
import pytest
import yaml
from command_line import only, summary
from lightning import Trainer
from photos import TINY

from relvit.app.cli import main
from relvit.app.cli.fit import refused_options
from relvit.app.plots import read_metrics
from relvit.app.training import lightning_options

pytestmark = pytest.mark.usefixtures("blank_figures")

PAGE = Path(__file__).parents[4] / "docs" / "options.md"
BAR = "--trainer.enable_progress_bar=false"
CSV = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=csv"]


def with_callback(name, *arguments):
    return [f"--trainer.callbacks+={name}", *(f"--trainer.callbacks.{each}" for each in arguments)]


# Callback -> its arguments, and how its refusal begins, or None where it works.
CALLBACKS = {
    "BackboneFinetuning": ([], "it adds parameters"),
    "BaseFinetuning": ([], "it adds parameters"),
    "BasePredictionWriter": ([], None),
    "BatchSizeFinder": ([], "the learning rate and the number of steps are planned"),
    "Callback": ([], None),
    "Checkpoint": ([], None),
    "DeviceStatsMonitor": ([], None),
    "EarlyStopping": (["monitor=val/loss"], None),
    "EMAWeightAveraging": ([], "in checkpoints its average"),
    "GradientAccumulationScheduler": (["scheduling={0: 1, 1: 2}"], "the schedule counts"),
    "LambdaCallback": ([], None),
    "LearningRateFinder": ([], "it changes the optimiser's rate alone"),
    "LearningRateMonitor": ([], None),
    "ModelCheckpoint": (["save_last=true"], None),
    "ModelPruning": (["pruning_fn=l1_unstructured"], "it renames the weights"),
    "ModelSummary": ([], None),
    "OnExceptionCheckpoint": (["dirpath=x"], "the next training would go on from its file"),
    "ProgressBar": ([], None),
    "RichModelSummary": ([], None),
    "RichProgressBar": ([], None),
    "SpikeDetection": ([], "it reads a loss"),
    "StochasticWeightAveraging": (["swa_lrs=0.01"], "it takes the place of the schedule"),
    "ThroughputMonitor": (["batch_size_fn=builtins.len"], None),
    "Timer": (["duration=00:01:00:00"], None),
    "TQDMProgressBar": ([], None),
    "WeightAveraging": ([], "in checkpoints its average"),
}
LOGGING = {kind.__name__ for kind in lightning_options.LOGGING}

# Argument of the Trainer -> options, and the words of the refusal, or the optimiser steps of an epoch.
TRAINER = [
    ("accelerator", ["accelerator=cpu"], 3),
    ("strategy", ["strategy=single_device"], 3),
    ("strategy", ["strategy=fsdp"], "strategy fsdp cannot train here"),
    ("strategy", ["strategy=ddp_spawn", "devices=2"], "processes cannot start by ddp_spawn here: give"),
    ("devices", ["devices=1"], 3),
    ("num_nodes", ["num_nodes=2"], "--trainer.num_nodes 2 needs this command on 2 machines"),
    ("precision", ["precision=bf16-mixed"], 3),
    ("precision", ["precision=bf16-true"], 3),
    ("precision", ["precision=64-true"], 3),
    ("precision", ["precision=16-true"], "the optimiser's eps 1e-08 is zero in the float16 of precision 16-true"),
    ("logger", ["logger=true"], 3),
    ("callbacks", [], 3),
    ("fast_dev_run", ["fast_dev_run=true"], None),
    ("max_epochs", [], 3),
    ("min_epochs", ["min_epochs=2"], 3),
    ("max_steps", ["max_steps=60"], 3),
    ("min_steps", ["min_steps=4"], 3),
    ("max_time", ["max_time=00:01:00:00"], 3),
    ("limit_train_batches", ["limit_train_batches=2"], 2),
    ("limit_val_batches", ["limit_val_batches=1"], 3),
    ("limit_test_batches", ["limit_test_batches=1"], 3),
    ("limit_predict_batches", ["limit_predict_batches=1"], 3),
    ("overfit_batches", ["overfit_batches=2"], "overfit_batches 2 takes the first images in order"),
    ("val_check_interval", ["val_check_interval=0.5"], 3),
    ("check_val_every_n_epoch", ["check_val_every_n_epoch=null", "val_check_interval=2"], 3),
    ("num_sanity_val_steps", ["num_sanity_val_steps=0"], 3),
    ("log_every_n_steps", ["log_every_n_steps=1"], 3),
    ("enable_checkpointing", ["enable_checkpointing=false"], "a run writes best.ckpt and last.ckpt; a trial"),
    ("enable_progress_bar", ["enable_progress_bar=true"], 3),
    ("enable_model_summary", ["enable_model_summary=true"], 3),
    ("accumulate_grad_batches", ["accumulate_grad_batches=2"], 2),
    ("gradient_clip_val", ["gradient_clip_val=1"], 3),
    ("gradient_clip_algorithm", ["gradient_clip_val=1", "gradient_clip_algorithm=value"], 3),
    ("gradient_clip_algorithm", ["gradient_clip_algorithm=value"], "no effect without --trainer.gradient_clip_val"),
    ("deterministic", ["deterministic=warn"], 3),
    ("benchmark", ["benchmark=true"], 3),
    ("inference_mode", ["inference_mode=false"], 3),
    ("use_distributed_sampler", ["use_distributed_sampler=false"], 3),
    ("profiler", ["profiler=simple"], 3),
    ("detect_anomaly", ["detect_anomaly=true"], 3),
    ("barebones", ["barebones=true"], "a run writes checkpoints, metrics and figures"),
    ("plugins", ["plugins=LightningEnvironment"], 3),
    ("plugins", ["plugins=AsyncCheckpointIO"], "a run writes its checkpoints itself"),
    ("sync_batchnorm", ["sync_batchnorm=true"], 3),
    ("reload_dataloaders_every_n_epochs", ["reload_dataloaders_every_n_epochs=1"], 3),
    ("default_root_dir", ["default_root_dir=x"], "runs are written into the folder of --runs"),
    ("enable_autolog_hparams", ["enable_autolog_hparams=false"], 3),
    ("model_registry", ["model_registry=a"], 3),
]


def test_the_tables_name_everything_that_lightning_has():
    assert set(CALLBACKS) == set(lightning.pytorch.callbacks.__all__)
    assert {name for name, *_ in TRAINER} == inspect.signature(Trainer.__init__).parameters.keys() - {"self"}


def fit(photos, *options, bar=False):
    given = [each for each in TINY if each != BAR or not bar]
    taken = {option.partition("=")[0] for option in options}
    given = [each for each in given if each.partition("=")[0] not in taken]
    own = ["--trainer.max_epochs=2", "--model.warmup_epochs=1", "--model.lr=4e-3", "--runs=runs"]
    return ["fit", f"--root={photos}", *given, *own, *options]


def rates(steps, epochs):
    """The rates after each epoch of a training: one epoch of linear warm-up, half at most, then a cosine to 1e-5."""
    total, warmup = steps * epochs, min(steps, steps * epochs // 2)
    done = [steps * (epoch + 1) for epoch in range(epochs)]
    return [1e-5 + (4e-3 - 1e-5) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2 for step in done]


def assert_trains_and_resumes(arguments, steps=3):
    assert main(arguments) == 0
    folder = only(Path("runs"))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["trainer"]["max_epochs"] == 2
    assert "serialize" not in str(config)
    assert summary(folder)["lr"] == 4e-3
    found = [value for _, value in read_metrics(folder / "metrics.csv")["lr"]]
    # Two epochs have a warm-up of one, which ends at the full rate.
    assert found == pytest.approx(rates(steps, 2))
    assert main(["fit", f"--resume={folder}", "--trainer.max_epochs=3"]) == 0
    found = [value for _, value in read_metrics(folder / "metrics.csv")["lr"]]
    assert found == pytest.approx([rates(steps, 2)[0], rates(steps, 2)[1], rates(steps, 3)[2]])
    return folder


# A run takes about two seconds; the quick test has two that Lightning's own hooks would most easily break.
QUICK = ("ModelCheckpoint", "Timer")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if refusal or name in QUICK else pytest.mark.slow)
        for name, (_, refusal) in CALLBACKS.items()
    ],
)
def test_callbacks(name, photos, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    arguments, refusal = CALLBACKS[name]
    arguments = with_callback(name, *arguments)
    if name in LOGGING:
        assert f"Lightning's {name} writes to a logger, and there is none" in fails(fit(photos, *arguments))
        arguments += CSV
    arguments = fit(photos, *arguments, bar="ProgressBar" in name)
    if refusal:
        message = fails(arguments)
        assert f"Lightning's {name} cannot be used here: {refusal}" in message
        assert not Path("runs").exists()
    else:
        assert_trains_and_resumes(arguments)


@pytest.mark.parametrize(
    ("name", "options", "outcome"),
    [
        pytest.param(*row, id="-".join([row[0], *row[1]]), marks=() if type(row[2]) is not int else pytest.mark.slow)
        for row in TRAINER
    ],
)
def test_arguments_of_the_trainer(name, options, outcome, photos, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    arguments = fit(photos, *(f"--trainer.{option}" for option in options))
    if isinstance(outcome, str):
        assert outcome in fails(arguments)
        assert not Path("runs").exists()
    elif outcome is None:
        assert main(arguments) == 0
        assert not Path("runs").exists()
    else:
        assert_trains_and_resumes(arguments, outcome)


def test_an_average_needs_weights_in_float32(photos, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    message = fails(fit(photos, "--model.ema_decay=0.9", "--precision=bf16-true"))
    assert "would be lost in the rounding of precision bf16-true: give --precision bf16-mixed" in message


def test_values_that_the_configuration_cannot_hold(photos, tmp_path, monkeypatch, fails):
    """A default of a user's callback may be any object; the run could not be resumed."""
    monkeypatch.chdir(tmp_path)
    message = fails(fit(photos, *with_callback("failures.OfADevice")))
    assert "config.yaml cannot hold cpu, an argument of a class in the trainer's options" in message
    assert not Path("runs").exists()


def test_the_page_lists_what_is_refused():
    page = PAGE.read_text()
    kinds = {kind.__name__ for kind in lightning_options.REFUSED} | {"OnExceptionCheckpoint"}
    options = {*refused_options.REFUSED, "overfit_batches", "default_root_dir"}
    missing = [name for name in kinds | options if f"`{name}`" not in page]
    assert missing == []
