"""The tool that compares models with themselves after a retrofit, on one layer and a small image."""

import pytest
from scripts import load

elsewhere = load("elsewhere")
# Only these sources can be built for a small size, and then have the same features; the other sources resize otherwise.
SAME_AT_SMALL_SIZES = ["timm-sam", "timm-beit", "timm-swin", "timm-swin-v2"]


@pytest.mark.parametrize("name", elsewhere.MODELS)
def test_one_layer(name):
    library = elsewhere.MODELS[name].library
    pytest.importorskip(library, reason=f"docs/sam.md says how to install {library}")
    found = elsewhere.compare(name, 1, (48, 32), rounds=1, clock="cpu")
    # The only layer of SAM has windows, whose tables serve all sizes; timm's embedding is resized by both.
    assert (found["difference"] < 1e-4) == (name in SAME_AT_SMALL_SIZES)
    assert found["forward time"] > 0
    assert found["step time"] > 0


def test_peak():
    # In a process that has computed before, memory may be there already.
    assert elsewhere.peak("timm-swin", 1, (48, 32), True, "step") >= 0


def test_sizes():
    assert elsewhere.sizes_of(["1024", "1024x512"]) == [(1024, 1024), (1024, 512)]
