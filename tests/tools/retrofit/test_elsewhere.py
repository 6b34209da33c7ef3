"""The tool that compares SAM's encoders with themselves after a retrofit, on one layer and a small image."""

import pytest
from scripts import load

elsewhere = load("elsewhere")


@pytest.mark.parametrize("library", elsewhere.LIBRARIES)
def test_one_layer(library):
    pytest.importorskip(library, reason=f"pip install 'relvit[elsewhere]' brings {library}")
    found = elsewhere.compare(library, 1, (48, 32), rounds=1, clock="cpu")
    # The only layer has windows, whose tables serve all sizes; timm's embedding is resized by both.
    assert (found["difference"] < 1e-4) == (library == "timm")
    assert found["forward time"] > 0
    assert found["step time"] > 0
    # In a process that has computed before, memory may be there already.
    assert elsewhere.peak(library, 1, (48, 32), True, "step") >= 0


def test_sizes():
    assert elsewhere.sizes_of(["1024", "1024x512"]) == [(1024, 1024), (1024, 512)]
