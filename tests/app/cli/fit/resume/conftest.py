"""A run of four epochs, copied for a test that trains it further or spoils it."""

import shutil

import pytest


@pytest.fixture
def stopped(run, tmp_path):
    """A copy of a run of four epochs."""
    return shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns(".lock"))
