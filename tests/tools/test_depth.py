"""The scripts of tools/depth: the difference that they print is small, and the cue's classes are what they say."""

import torch
from scripts import load


def test_bands_differ_from_one_pass_by_rounding():
    assert float(load("band_memory").difference(2, "xl", 14)) < 1e-5


def test_the_cue_needs_both_marks():
    pixels, labels = load("cue").images(500, torch.Generator().manual_seed(0))
    # The sum over each 4 x 4 patch, by band: the mark has the largest one.
    sums = pixels.unflatten(2, (4, 4)).unflatten(4, (3, 4)).sum(dim=(1, 3, 5))
    first, last = (band.gather(1, band.abs().argmax(1, keepdim=True))[:, 0] > 0 for band in (sums[:, 0], sums[:, 3]))
    assert torch.equal(labels.bool(), first ^ last)
    # Neither mark alone says anything.
    for mark in (first, last):
        assert 0.4 < float(labels[mark].float().mean()) < 0.6
