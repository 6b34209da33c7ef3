"""Loggers by short names, and the figures and numbers that they get."""

from types import SimpleNamespace

import pytest
from command_line import summary
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relvit.app.cli.fit.fit import fit as fit_command
from relvit.app.cli.typed_words import read_arguments
from relvit.app.training.run.send_results import FIGURES, send_results


@pytest.mark.parametrize(
    ("word", "value"),
    [("wandb", "WandbLogger"), ("mlflow", "MLFlowLogger"), ("csv", "false"), ("tensorboard", "null"), ("Mine", "Mine")],
)
def test_words(word, value):
    for option in ("--logger", "--trainer.logger"):
        assert read_arguments("fit", fit_command, [option, word]).words == [f"--trainer.logger={value}"]


def recording(kind, sent):
    """Make a logger of this class that records what is sent to it, without the logger's package."""
    logger = object.__new__(type(kind.__name__, (kind,), {"experiment": None, "run_id": "7", "finalize": print}))
    artifacts = SimpleNamespace(log_artifact=lambda run, path: sent.append((run, path)))
    type(logger).experiment = artifacts
    type(logger).log_metrics = lambda self, numbers, step=None: sent.append(numbers)
    type(logger).log_image = lambda self, key, images: sent.append((key, images))
    return logger


@pytest.mark.parametrize("kind", [WandbLogger, MLFlowLogger, CSVLogger])
def test_figures_and_numbers_are_sent(kind, tmp_path):
    path, sent = tmp_path / FIGURES[1], []
    Image.new("RGB", (3, 2)).save(path)
    results = {"model": "relvit_tiny", "val/acc1": 0.5, "epochs": 3}
    send_results(SimpleNamespace(loggers=[recording(kind, sent)]), tmp_path, results)
    figure = {WandbLogger: [("curves", [str(path)])], MLFlowLogger: [("7", str(path))]}.get(kind, [])
    assert sent == [{"summary/val/acc1": 0.5}, *figure]


def test_the_default_log(run):
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert events.Scalars("summary/test/acc1")[0].value == pytest.approx(summary(run)["test/acc1"])
    (image,) = events.Images("curves")
    with Image.open(run / "curves.png") as figure:
        assert (image.width, image.height) == figure.size
