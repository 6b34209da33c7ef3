"""Every callback of Lightning and every argument of its Trainer: a run with it trains, resumes and keeps its schedule,
or it is refused in one line before the training starts."""

import inspect
import math
from pathlib import Path
from typing import Union

import lightning.pytorch.callbacks
import pytest
import yaml
from command_line import only, summary
from lightning import Trainer
from photos import TINY

from relvit.app.cli import main
from relvit.app.cli.fit import refused_options
from relvit.app.cli.parser import Parser
from relvit.app.plots import read_metrics
from relvit.app.training import lightning_options

PAGE = Path(__file__).parents[4] / "docs" / "options.md"
BAR = "--trainer.enable_progress_bar=false"
CSV = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=csv"]


def with_callback(name, *arguments):
    return [f"--trainer.callbacks+={name}", *(f"--trainer.callbacks.{each}" for each in arguments)]


# Each callback has its arguments, and the beginning of its refusal, or None if the callback works.
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

# Each row has an argument of the Trainer, the options to test, and the text of the refusal or the number of optimiser
# steps of an epoch.
TRAINER = [
    ("accelerator", ["accelerator=cpu"], 3),
    ("strategy", ["strategy=single_device"], 3),
    ("strategy", ["strategy=fsdp"], "strategy fsdp cannot train here"),
    ("strategy", ["strategy=ddp_spawn", "devices=2"], "--trainer.strategy ddp_spawn copies the main process"),
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
    ("enable_checkpointing", ["enable_checkpointing=false"], "a run writes best.ckpt and last.ckpt: leave this"),
    (
        "enable_checkpointing",
        ["enable_checkpointing=false", "fast_dev_run=true"],
        "leave this option out; --trainer.fa",
    ),
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
    ("plugins", ["plugins=AsyncCheckpointIO"], "relvit writes checkpoints by its own plugin"),
    ("sync_batchnorm", ["sync_batchnorm=true"], 3),
    ("reload_dataloaders_every_n_epochs", ["reload_dataloaders_every_n_epochs=1"], 3),
    ("default_root_dir", ["default_root_dir=x"], "relvit writes runs into another folder"),
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
    """Compute the rate after each epoch: linear warm-up of one epoch, at most half of the training, then a cosine."""
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
    # In a training of two epochs the warm-up takes one epoch, and ends at the full rate.
    assert found == pytest.approx(rates(steps, 2))
    assert main(["fit", f"--resume={folder}", "--trainer.max_epochs=3"]) == 0
    found = [value for _, value in read_metrics(folder / "metrics.csv")["lr"]]
    assert found == pytest.approx([rates(steps, 2)[0], rates(steps, 2)[1], rates(steps, 3)[2]])
    return folder


REFUSED = [name for name, (_, refusal) in CALLBACKS.items() if refusal]
# A Trainer refuses a second progress bar or model summary.
BARS = ("RichProgressBar", "ProgressBar", "TQDMProgressBar")
SUMMARIES = ("RichModelSummary", "ModelSummary")


@pytest.mark.parametrize("name", REFUSED)
def test_a_callback_that_disturbs_the_training_is_refused(name, photos, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    arguments, refusal = CALLBACKS[name]
    message = fails(fit(photos, *with_callback(name, *arguments), *(CSV if name in LOGGING else ())))
    assert f"Lightning's {name} cannot be used here: {refusal}" in message
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", sorted(LOGGING))
def test_a_callback_that_writes_to_a_logger_is_refused_without_one(name, photos, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    message = fails(fit(photos, *with_callback(name, *CALLBACKS[name][0])))
    assert f"Lightning's {name} writes to a logger, and there is none" in message


# The two callbacks without the mark `slow` are the most likely to break if Lightning's hooks change.
@pytest.mark.parametrize(
    "names",
    [
        ("ModelCheckpoint", "Timer"),
        pytest.param(
            [name for name in CALLBACKS if name not in {*REFUSED, *BARS[1:], *SUMMARIES[1:]}], marks=pytest.mark.slow
        ),
        *(pytest.param(names, marks=pytest.mark.slow) for names in (BARS[1:2], (BARS[2], SUMMARIES[1]))),
    ],
    ids=" ".join,
)
def test_a_training_with_other_callbacks_resumes_and_keeps_its_schedule(names, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [option for name in names for option in with_callback(name, *CALLBACKS[name][0])]
    bar = any(name in BARS for name in names)
    assert_trains_and_resumes(fit(photos, *arguments, *(CSV if LOGGING & set(names) else ()), bar=bar))


@pytest.mark.parametrize(
    ("options", "message"),
    [pytest.param(*row[1:], id="-".join([row[0], *row[1]])) for row in TRAINER if isinstance(row[2], str)],
)
def test_an_argument_of_the_trainer_that_disturbs_the_training_is_refused(
    options, message, photos, tmp_path, monkeypatch, fails
):
    monkeypatch.chdir(tmp_path)
    assert message in fails(fit(photos, *(f"--trainer.{option}" for option in options)))
    assert not Path("runs").exists()


def test_a_rehearsal_leaves_no_run(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(fit(photos, "--trainer.fast_dev_run=true", "--patience=2", "--save_every=1", "--lr_find")) == 0
    assert "fast_dev_run, which leaves out --lr_find, --patience and --save_every" in capsys.readouterr().out
    assert not Path("runs").exists()


def groups():
    """Group rows of `TRAINER` that train: no two rows in a group set one option or have different numbers of steps."""
    found = []
    for _, options, steps in TRAINER:
        if type(steps) is int:
            names = {option.partition("=")[0] for option in options}
            # Each of these arguments changes the meaning of other options, so its row is in no group with other rows.
            alone = {"precision", "max_steps", "check_val_every_n_epoch", "val_check_interval"} & names
            fits = (each for each in found if each[2] == steps and not alone and not each[0] & names and not each[3])
            group = next(fits, None)
            if group is None:
                found.append(group := (set(), [], steps, alone))
            group[0].update(names)
            group[1].extend(options)
    return [(options, steps) for _, options, steps, _ in found]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "steps"), groups(), ids=str)
def test_a_training_with_other_arguments_of_the_trainer_resumes_and_keeps_its_schedule(
    options, steps, photos, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert_trains_and_resumes(fit(photos, *(f"--trainer.{option}" for option in options)), steps)


def test_an_average_needs_weights_in_float32(photos, tmp_path, monkeypatch, fails):
    monkeypatch.chdir(tmp_path)
    message = fails(fit(photos, "--model.ema_decay=0.9", "--precision=bf16-true"))
    assert "would be lost in the rounding of precision bf16-true: give --precision bf16-mixed" in message


def test_values_that_the_configuration_cannot_hold(photos, tmp_path, monkeypatch, fails):
    """The default of a user's callback may be any object. Such a run could not be resumed, so it is refused."""
    monkeypatch.chdir(tmp_path)
    message = fails(fit(photos, *with_callback("failures.OfADevice")))
    assert (
        "config.yaml cannot hold cpu, the value of trainer.callbacks.0.init_args.device, so no run could be" in message
    )
    assert message.rstrip().endswith("give it as text or a number, or leave its class out")
    assert not Path("runs").exists()


def test_the_page_lists_what_is_refused():
    page = PAGE.read_text()
    kinds = {kind.__name__ for kind in lightning_options.REFUSED} | {"OnExceptionCheckpoint"}
    options = {*refused_options.REFUSED, "overfit_batches", "default_root_dir"}
    missing = [name for name in kinds | options if f"`{name}`" not in page]
    assert missing == []


class Limits:
    """`Union[int, float]` has this order of types if another library has used `Union[float, int]` before."""

    def __init__(self, batches: Union[float, int, None] = None):  # noqa: UP007 (`|` keeps the order in any case)
        self.batches = batches


@pytest.mark.parametrize(("typed", "expected"), [("1", 1), ("1.0", 1.0), ("0.5", 0.5), ("null", None)])
def test_whole_numbers_are_int_in_any_order_of_the_types(typed, expected):
    parser = Parser()
    parser.add_class_arguments(Limits, "limits")
    found = parser.parse_args([f"--limits.batches={typed}"]).limits.batches
    assert (found, type(found)) == (expected, type(expected))
