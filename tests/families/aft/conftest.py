"""Make tiles so small that the tests compute several of them."""

import pytest

from relvit.families.aft import pairs


@pytest.fixture(scope="module")
def several_tiles():
    """Divide small inputs into several tiles, of which the last one is smaller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "TILE_LOGITS", 1500)
        yield
