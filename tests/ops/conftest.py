"""Make tiles so small that the tests compute several of them."""

import pytest

from relvit.ops.backends import gathered, tiled


@pytest.fixture(scope="module")
def several_tiles():
    """Divide small inputs into several tiles, of which the last one is smaller."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (tiled, gathered):
            patch.setattr(module, "TILE_LOGITS", 1)
            patch.setattr(module, "LEAST_QUERIES", 4)
        yield
