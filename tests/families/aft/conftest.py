"""Tiles small enough that a test has several."""

import pytest

from relvit.families.aft import pairs


@pytest.fixture(scope="module")
def several_tiles():
    """Divide small cases into several tiles, too, the last one smaller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "TILE_LOGITS", 1500)
        yield
