"""Fixtures of the application's tests: small images, trained runs, and commands that fail."""

from pathlib import Path

import pytest
from command_line import drawn_figures, fit, only, without_figures
from photos import TINY, write_photos

from relvit.app.cli import main


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """Three classes with six images each in train, val and test. Do not change this folder: copy it."""
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def run(photos, tmp_path_factory) -> Path:
    """The folder of a short training on `photos` through the command line, with the default log and figures."""
    options = ["--trainer.max_epochs=4", "--model.lr=5e-3", "--model.warmup_epochs=1", "--trainer.logger=tensorboard"]
    with drawn_figures():
        return fit(photos, tmp_path_factory.mktemp("runs"), *options)


@pytest.fixture(scope="session")
def best(run) -> Path:
    """The best checkpoint of that training."""
    return run / "checkpoints" / "best.ckpt"


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory) -> Path:
    """The folder of one epoch on scikit-learn's digits, grey images in memory; the model still makes many mistakes."""
    runs = tmp_path_factory.mktemp("digits_runs")
    tiny = [a for a in TINY if not a.startswith(("--data.", "--model.model_kwargs.patch_size"))]
    arguments = ["fit", "--data=DigitsData", f"--runs={runs}", *tiny, "--model.model_kwargs.patch_size=4"]
    with without_figures():
        assert main([*arguments, "--trainer.max_epochs=1", "--data.batch_size=256"]) == 0
    return only(runs)


@pytest.fixture
def fails(capsys):
    """Return a function that runs a command that must fail, checks its exit status and returns its one or two lines."""

    def run(arguments, status=2):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == status, arguments
        message = capsys.readouterr().err
        assert "Traceback" not in message
        assert len(message.strip().splitlines()) <= 2, message
        return message

    return run
