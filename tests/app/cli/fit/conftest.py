"""Let trainings draw no figures, because figures take half of the time of a short training."""

import pytest


@pytest.fixture
def figures():
    """Draw the figures in a test that asks for this fixture."""


@pytest.fixture(autouse=True)
def _blank_unless_asked_for(request):
    if "figures" not in request.fixturenames:
        request.getfixturevalue("blank_figures")
