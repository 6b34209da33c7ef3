"""Trainings without their figures, which take half of the time of a short one."""

import pytest
from matplotlib.figure import Figure
from PIL import Image


@pytest.fixture
def figures():
    """Have the figures of a test drawn."""


@pytest.fixture(autouse=True)
def _blank_figures(request, monkeypatch):
    """Write a blank picture in the place of each figure. The run that tests share is made before, with its figures."""
    if "figures" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: Image.new("RGB", (2, 2)).save(path, "PNG"))
