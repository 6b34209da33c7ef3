"""Fixtures of data and runs that the tests of the application share; commands draw figures only in tests of figures."""

import pytest
from command_line import without_figures
from trained_runs import best, digits_run, fails, photos, run

__all__ = ["best", "digits_run", "fails", "photos", "run"]


@pytest.fixture
def figures():
    """Draw the figures in a test that asks for this fixture."""


@pytest.fixture(autouse=True)
def _blank_unless_asked_for(request):
    # Figures take half of the time of a short training. Runs that tests share already have their figures.
    if "figures" in request.fixturenames:
        yield
    else:
        with without_figures():
            yield
