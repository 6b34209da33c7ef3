"""Mixup and CutMix compared with their formulas, pixel by pixel."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.data.mixup import mixup_target

from relvit.app.data import BatchMix

LABELS = torch.tensor([0, 3, 1, 1, 4])


def batch(seed=0):
    return torch.rand(5, 3, 8, 12, generator=torch.Generator().manual_seed(seed))


def fixed(mix, monkeypatch, lam):
    """Fix the proportion, and mix each image with the image before it."""
    monkeypatch.setattr(torch, "randperm", lambda n: torch.arange(n))
    for part in (mix.mixup, mix.cutmix):
        if part is not None:
            monkeypatch.setattr(part._dist, "sample", lambda shape: torch.tensor([lam]))
    return mix


def test_mixup_of_a_fixed_proportion(monkeypatch):
    mix = fixed(BatchMix(5, cutmix_alpha=0, label_smoothing=0), monkeypatch, 0.7)
    images = batch()
    out, targets = mix(images, LABELS)
    for i in range(5):
        torch.testing.assert_close(out[i], 0.7 * images[i] + 0.3 * images[i - 1])
        wanted = torch.zeros(5)
        wanted[LABELS[i]] += 0.7
        wanted[LABELS[i - 1]] += 0.3
        torch.testing.assert_close(targets[i], wanted)
    torch.testing.assert_close(images, batch(), rtol=0, atol=0)  # The images of the caller are unchanged.


@pytest.mark.parametrize("seed", range(2))
def test_cutmix_pastes_a_rectangle_and_counts_its_area(monkeypatch, seed):
    mix = fixed(BatchMix(5, mixup_alpha=0, label_smoothing=0), monkeypatch, 0.7)
    images = batch()
    torch.manual_seed(seed)
    out, targets = mix(images, LABELS)
    pasted = (out == images.roll(1, 0)).all(1)
    kept = (out == images).all(1)
    assert (pasted ^ kept).all()
    rows, columns = pasted[0].any(1).nonzero().flatten(), pasted[0].any(0).nonzero().flatten()
    rectangle = torch.zeros(8, 12, dtype=torch.bool)
    rectangle[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = True
    assert (pasted == rectangle).all()
    assert 0 < len(rows) <= int(2 * 0.5 * 0.3**0.5 * 8)
    left = 1 - rectangle.double().mean().item()
    for i in range(5):
        wanted = left * F.one_hot(LABELS[i], 5) + (1 - left) * F.one_hot(LABELS[i - 1], 5)
        torch.testing.assert_close(targets[i].double(), wanted.double(), rtol=0, atol=1e-6)


def test_several_labels(monkeypatch):
    several = torch.rand(5, 4, generator=torch.Generator().manual_seed(2)) < 0.5
    mix = fixed(BatchMix(4, cutmix_alpha=0, label_smoothing=0.1), monkeypatch, 0.7)
    _, targets = mix(batch(), several)
    wanted = 0.7 * several.float() + 0.3 * several.float().roll(1, 0)
    torch.testing.assert_close(targets, 0.9 * wanted + 0.1 / 4)
    _, targets = BatchMix(4, prob=0, label_smoothing=0.1)(batch(), several)
    torch.testing.assert_close(targets, 0.9 * several.float() + 0.1 / 4)


def test_targets_sum_to_one():
    mix = BatchMix(5, prob=0.7, label_smoothing=0.1)
    assert mix.state_dict() == {}
    torch.manual_seed(0)
    for _ in range(30):
        images, targets = mix(batch().bfloat16(), LABELS)
        assert (images.dtype, targets.shape, targets.dtype) == (torch.bfloat16, (5, 5), torch.float32)
        torch.testing.assert_close(targets.sum(1), torch.ones(5))
        assert targets.min() >= 0.1 / 5 - 1e-7


def test_smoothing_is_that_of_cross_entropy_and_of_timm(monkeypatch):
    logits = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    _, targets = BatchMix(5, prob=0, label_smoothing=0.2)(batch(), LABELS)
    torch.testing.assert_close(
        F.cross_entropy(logits, targets), F.cross_entropy(logits, LABELS, label_smoothing=0.2), rtol=1e-6, atol=1e-6
    )
    # timm mixes the batch with the reversed batch, so of two images each is mixed with the other one.
    mix = fixed(BatchMix(5, cutmix_alpha=0, label_smoothing=0.1), monkeypatch, 0.35)
    _, targets = mix(batch()[:2], LABELS[:2])
    torch.testing.assert_close(targets, mixup_target(LABELS[:2], 5, lam=0.35, smoothing=0.1))


def test_off_leaves_the_images_alone():
    for mix in (BatchMix(5, prob=0), BatchMix(5, mixup_alpha=0, cutmix_alpha=0)):
        out, _ = mix(batch(), LABELS)
        assert torch.equal(out, batch())


def kinds(mix, count):
    """Return how often a batch is left as it is, mixed by mixup, and mixed by CutMix."""
    counts = np.zeros(3, int)
    images = batch()
    torch.manual_seed(0)
    for _ in range(count):
        out, _ = mix(images, LABELS)
        # Every pixel of CutMix is a pixel of one of the images.
        old = (out[:, None] == images[None]).all(2).any(1)
        counts[0 if torch.equal(out, images) else 2 if old.all() else 1] += 1
    return (counts / count).round(2).tolist()


def test_probabilities():
    # A CutMix of less than one pixel changes nothing. With alpha 1 this happens in about 2 % of the batches, where 1 -
    # lam < 1/64.
    assert kinds(BatchMix(5, switch_prob=0.25), 700) == pytest.approx([0.01, 0.75, 0.24], abs=0.05)
    assert kinds(BatchMix(5, prob=0.4, switch_prob=0.5), 700) == pytest.approx([0.61, 0.2, 0.2], abs=0.05)
    assert kinds(BatchMix(5, cutmix_alpha=0), 50) == [0, 1, 0]
    assert kinds(BatchMix(5, mixup_alpha=0), 50)[1] == 0


def test_partners_are_random_others_and_the_order_stays():
    mix = BatchMix(5, mixup_alpha=0.5, cutmix_alpha=0, label_smoothing=0)
    torch.manual_seed(0)
    images, seen, proportions = torch.eye(5).reshape(5, 1, 1, 5), set(), []
    for _ in range(600):
        out, targets = mix(images, torch.arange(5))
        # The images are one-hot vectors, so a mixed image equals its mixed label.
        torch.testing.assert_close(out.flatten(1), targets)
        proportions.append(float(targets[0, 0]))
        if 0.01 < targets[0, 0] < 0.99:
            assert ((targets > 0).sum(1) == 2).all()
            assert (targets.diagonal() == targets[0, 0]).all()
            seen |= {tuple(row.nonzero().flatten().tolist()) for row in targets}
    assert len(seen) == 10
    # The Beta distribution has the mean 1/2 and the variance 1 / (4 (2 alpha + 1)).
    assert np.mean(proportions) == pytest.approx(0.5, abs=0.03)
    assert np.var(proportions) == pytest.approx(1 / (4 * 2), abs=0.012)


def test_a_seed_gives_the_same_again():
    results = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        results.append([BatchMix(5)(batch(), LABELS)[0] for _ in range(4)])
    assert all(map(torch.equal, results[0], results[1]))
    assert not all(map(torch.equal, results[0], results[2]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_classes": 1}, "num_classes must be 2 or more"),
        ({"mixup_alpha": -1}, "mixup_alpha must be 0 or more"),
        ({"cutmix_alpha": -0.5}, "cutmix_alpha must be 0 or more"),
        ({"prob": 1.1}, "prob must be in 0 <= x <= 1"),
        ({"switch_prob": -0.1}, "switch_prob must be in 0 <= x <= 1"),
        ({"label_smoothing": 1.0}, "label_smoothing must be in 0 <= x < 1"),
    ],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        BatchMix(**{"num_classes": 5, **wrong})


def test_wrong_batches():
    with pytest.raises(ValueError, match=r"images have shape \(5, 3, 8, 12\), and labels shape \(4,\) of torch.int64"):
        BatchMix(5)(batch(), LABELS[:4])
    with pytest.raises(ValueError, match=r"labels shape \(5, 5\) of torch.int64: .* or as bool \(B, 5\)"):
        BatchMix(5)(batch(), F.one_hot(LABELS, 5))
