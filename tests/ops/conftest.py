"""What tests of the operations share."""

import pytest

from relvit.families.aft import pairs
from relvit.ops.backends import gathered, tiled


@pytest.fixture(scope="module")
def several_tiles():
    """Small cases must still be made of several tiles, the last one smaller."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (tiled, gathered):
            patch.setattr(module, "TILE_LOGITS", 1)
            patch.setattr(module, "LEAST_QUERIES", 4)
        patch.setattr(pairs, "TILE_LOGITS", 1500)
        yield
