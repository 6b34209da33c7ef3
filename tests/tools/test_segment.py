"""Segmentation by features: labels on the digits, features that shift with the image, scores by brute force."""

import pytest
import torch
from scripts import load
from torch import nn

segment = load("segment")


def test_pixels_with_ink_have_the_digit_as_label():
    images, labels = segment.Canvas(train=True, seed=0)(8, (64, 96))
    assert images.shape == (8, 1, 64, 96)
    assert labels.shape == (8, 64, 96)
    ink, ground = images[:, 0][labels < 10].double(), images[:, 0][labels == 10].double()
    assert ink.mean() > ground.mean() + 0.5
    assert labels.unique().tolist() == list(range(11))
    again = segment.Canvas(train=True, seed=0)(8, (64, 96))
    assert torch.equal(again[0], images)
    assert torch.equal(again[1], labels)


class Ink(nn.Module):
    """A model that labels bright pixels as the digit 0 and all other pixels as background."""

    def forward(self, images):
        logits = torch.zeros(len(images), 11, *images.shape[2:])
        logits[:, 0], logits[:, 10] = images[:, 0], 0.2
        return logits


def test_mean_iou_against_brute_force():
    found = segment.mean_iou(Ink(), (64, 80), count=1)
    images, labels = segment.Canvas(False, seed=1)(4, (64, 80))
    predicted = torch.where(images[:, 0] > 0.2, 0, 10)
    ious = [((predicted == c) & (labels == c)).sum() / ((predicted == c) | (labels == c)).sum() for c in range(11)]
    assert found == pytest.approx(100 * float(torch.stack(ious).nanmean()), abs=1e-4)


@pytest.mark.parametrize("name", segment.MODELS)
def test_features_are_those_of_the_shifted_places(name):
    torch.manual_seed(0)
    model = segment.Segmenter(name).eval()
    images, _ = segment.Canvas(False, seed=2)(2, (48 + 8, 48 + 12))
    with torch.inference_mode():
        first, second = model.features(images[..., :48, :48])[-1], model.features(images[..., 8:, 12:])[-1]
    cosines = {}
    for down in range(5):
        for right in range(5):
            moved = first[..., down:, right:], second[..., : 12 - down, : 12 - right]
            cosines[down, right] = float(torch.cosine_similarity(*moved, dim=1).mean())
    assert max(cosines, key=cosines.get) == segment.SHIFT


def test_agreement_is_one_where_places_do_not_matter():
    model = nn.Module()
    model.features = lambda images: [nn.functional.pixel_unshuffle(images, segment.PATCH)]
    assert segment.agreement(model, (64, 48), count=1) == pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_a_row_has_means_over_seeds(capsys, monkeypatch):
    monkeypatch.setattr(segment, "SIZES", ((48, 48), (24, 48)))
    segment.main(["--models", "relvit_tiny", "--seeds", "0", "1", "--steps", "2", "--count", "1"])
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.count("|") == row.count("|") == 5
    assert row.startswith("| `relvit_tiny` | ")
    assert row.count("±") == 3
