"""Small data and one small trained run, shared by the tests that need them."""

import os
from pathlib import Path

import pytest
import torch
from photos import TINY, write_photos

from relvit.cli import main

# Side by side (pytest -n), each process has a core for itself.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """Three classes, six images each in train, val and test. Do not change it: copy it."""
    return write_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def run(photos, tmp_path_factory) -> Path:
    """The folder of a short training on `photos` through the command line."""
    runs = tmp_path_factory.mktemp("runs")
    arguments = ["fit", "--data=ImageFolderData", f"--data.root={photos}", f"--runs={runs}", *TINY]
    assert main([*arguments, "--trainer.max_epochs=4", "--model.lr=5e-3", "--model.warmup_epochs=1"]) == 0
    (folder,) = runs.iterdir()
    return folder


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory) -> Path:
    """The folder of one epoch on scikit-learn's digits, which are grey and in memory: many mistakes are left."""
    runs = tmp_path_factory.mktemp("digits_runs")
    tiny = [a for a in TINY if not a.startswith(("--data.", "--model.model_kwargs.patch_size"))]
    arguments = ["fit", "--data=DigitsData", f"--runs={runs}", *tiny, "--model.model_kwargs.patch_size=4"]
    assert main([*arguments, "--trainer.max_epochs=1", "--data.batch_size=256"]) == 0
    (folder,) = runs.iterdir()
    return folder
