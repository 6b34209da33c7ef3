"""Tiles small enough that a test has several."""

import pytest

from relvit.ops.backends import gathered, tiled


@pytest.fixture(scope="module")
def several_tiles():
    """Divide small cases into several tiles, too, the last one smaller."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (tiled, gathered):
            patch.setattr(module, "TILE_LOGITS", 1)
            patch.setattr(module, "LEAST_QUERIES", 4)
        yield
