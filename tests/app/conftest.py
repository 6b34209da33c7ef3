"""Fixtures of data and runs that the tests of the application share; commands draw figures only in tests of figures."""

import pytest
from command_line import drawn_figures, without_figures
from trained_runs import best, digits_run, fails, photos, run

__all__ = ["best", "digits_run", "fails", "photos", "run"]


@pytest.fixture(scope="module", autouse=True)
def _blank_figures():
    # Figures take half of the time of a short training.
    with without_figures():
        yield


@pytest.fixture
def figures():
    """Draw the figures in a test that asks for this fixture."""
    with drawn_figures():
        yield
