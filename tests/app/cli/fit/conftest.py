"""Trainings without their figures, which take half of the time of a short one."""

import pytest


@pytest.fixture
def figures():
    """Have the figures of a test drawn."""


@pytest.fixture(autouse=True)
def _blank_unless_asked_for(request):
    if "figures" not in request.fixturenames:
        request.getfixturevalue("blank_figures")
