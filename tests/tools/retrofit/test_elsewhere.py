"""The tool that compares models before and after a retrofit, with one layer and a small image."""

import pytest
from scripts import load

elsewhere = load("elsewhere")
# Only these sources can be built for a small size, and then have the same features. The other sources resize
# differently.
SAME_AT_SMALL_SIZES = ["timm-sam", "timm-beit", "timm-swin", "timm-swin-v2"]


@pytest.mark.parametrize("name", elsewhere.MODELS)
def test_one_layer(name):
    library = elsewhere.MODELS[name].library
    pytest.importorskip(library, reason=f"docs/sam.md says how to install {library}")
    found = elsewhere.compare(name, 1, (48, 32), rounds=1, clock="cpu")
    # SAM's only layer has windows, whose tables are the same at all sizes, and timm's embedding is resized in the same
    # way.
    assert (found["difference"] < 1e-4) == (name in SAME_AT_SMALL_SIZES)
    assert found["forward time"] > 0
    assert found["step time"] > 0


def test_peak():
    # This process has computed before, so its memory may not grow.
    assert elsewhere.peak("timm-swin", 1, (48, 32), True, "step") >= 0


def test_sizes():
    assert elsewhere.sizes_of(["1024", "1024x512"]) == [(1024, 1024), (1024, 512)]
