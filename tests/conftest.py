"""Small data and one small trained run, shared by the tests that need them."""

import gc
import os
from pathlib import Path

import pytest
import torch
from command_line import fit, only
from photos import TINY, write_photos

from relvit.cli import main
from relvit.families.aft import pairs
from relvit.ops.backends import gathered, tiled

# With `pytest -n` each process has a core for itself.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Keep imported modules out of the garbage collector, which would otherwise visit them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """Three classes, six images each in train, val and test. Do not change it: copy it."""
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def run(photos, tmp_path_factory) -> Path:
    """The folder of a short training on `photos` through the command line, with the default log."""
    options = ["--trainer.max_epochs=4", "--model.lr=5e-3", "--model.warmup_epochs=1", "--trainer.logger=tensorboard"]
    return fit(photos, tmp_path_factory.mktemp("runs"), *options)


@pytest.fixture(scope="session")
def best(run) -> Path:
    """The best checkpoint of that training."""
    return run / "checkpoints" / "best.ckpt"


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory) -> Path:
    """The folder of one epoch on scikit-learn's digits, which are grey and in memory: many mistakes are left."""
    runs = tmp_path_factory.mktemp("digits_runs")
    tiny = [a for a in TINY if not a.startswith(("--data.", "--model.model_kwargs.patch_size"))]
    arguments = ["fit", "--data=DigitsData", f"--runs={runs}", *tiny, "--model.model_kwargs.patch_size=4"]
    assert main([*arguments, "--trainer.max_epochs=1", "--data.batch_size=256"]) == 0
    return only(runs)


@pytest.fixture(scope="module")
def several_tiles():
    """Divide small cases into several tiles, too, the last one smaller."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (tiled, gathered):
            patch.setattr(module, "TILE_LOGITS", 1)
            patch.setattr(module, "LEAST_QUERIES", 4)
        patch.setattr(pairs, "TILE_LOGITS", 1500)
        yield


@pytest.fixture
def fails(capsys):
    """Return a function that runs a command which fails, checks its exit status and returns its one or two lines."""

    def run(arguments, status=2):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == status, arguments
        message = capsys.readouterr().err
        assert "Traceback" not in message
        assert len(message.strip().splitlines()) <= 2, message
        return message

    return run
