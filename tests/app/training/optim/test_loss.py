"""Losses compared with explicit sums and with timm's losses."""

import math

import pytest
import torch
from small_training import Noise, build, train
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

from relvit.app.training import ClassificationLoss, soft_targets

LOGITS = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 3
LABELS = torch.tensor([0, 6, 2, 2, 4])
SOFT = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)).softmax(-1)
WEIGHTS = [0.5, 1.0, 2.0, 1.0, 3.0, 1.0, 0.25]


def test_soft_targets():
    for row, label in zip(soft_targets(LABELS, 7, 0.2).tolist(), LABELS.tolist(), strict=True):
        assert row == pytest.approx([0.8 + 0.2 / 7 if c == label else 0.2 / 7 for c in range(7)])


@pytest.mark.parametrize(
    ("ours", "of_labels", "of_soft"),
    [
        (ClassificationLoss(7), LabelSmoothingCrossEntropy(0.0), SoftTargetCrossEntropy()),
        (ClassificationLoss(7, smoothing=0.2), LabelSmoothingCrossEntropy(0.2), SoftTargetCrossEntropy()),
        (ClassificationLoss(7, "bce"), BinaryCrossEntropy(0.0), BinaryCrossEntropy()),
        (ClassificationLoss(7, "bce", 0.2, 0.1), BinaryCrossEntropy(0.2, 0.1), BinaryCrossEntropy(0.2, 0.1)),
        (ClassificationLoss(7, "bce", 0.0, 0.0), BinaryCrossEntropy(0.0, 0.0), BinaryCrossEntropy(0.0, 0.0)),
    ],
)
def test_losses_are_those_of_timm(ours, of_labels, of_soft):
    torch.testing.assert_close(ours(LOGITS, LABELS), of_labels(LOGITS, LABELS))
    torch.testing.assert_close(ours(LOGITS, SOFT), of_soft(LOGITS, SOFT))
    # Half-precision logits give a float32 loss.
    assert torch.equal(ours(LOGITS.bfloat16(), LABELS), ours(LOGITS.bfloat16().float(), LABELS))
    soft = SOFT.bfloat16()
    assert torch.equal(ours(LOGITS, soft), ours(LOGITS, soft.float()))


@pytest.mark.parametrize("kind", ["ce", "bce"])
def test_class_weights_add_up_over_batches(kind):
    loss = ClassificationLoss(7, kind, 0.1, class_weights=WEIGHTS)
    total = 0.0
    for logits, targets in zip(LOGITS.double().tolist(), soft_targets(LABELS, 7, 0.1).double().tolist(), strict=True):
        norm = math.log(sum(math.exp(z) for z in logits))
        for z, t, w in zip(logits, targets, WEIGHTS, strict=True):
            p = 1 / (1 + math.exp(-z))
            total += -w * t * (z - norm) if kind == "ce" else -w * (t * math.log(p) + (1 - t) * math.log(1 - p)) / 7
    assert float(loss(LOGITS, LABELS)) == pytest.approx(total / 5, rel=1e-5)
    parts = [loss(LOGITS[i : i + 1], LABELS[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(sum(parts) / 5, loss(LOGITS, LABELS))
    assert not loss.state_dict()


SEVERAL = torch.rand(5, 7, generator=torch.Generator().manual_seed(2)) < 0.4


def test_several_labels():
    """The formulas of the asymmetric loss (Ridnik et al. 2021, equations 2 to 7) and of binary cross-entropy."""
    logits = LOGITS.double().requires_grad_()
    p = logits.sigmoid()
    shifted = (p - 0.05).clamp(min=0)
    positive, negative = (1 - p) * p.log(), shifted**4 * (1 - shifted).log()
    expected = -torch.where(SEVERAL, positive, negative)
    ours = LOGITS.clone().requires_grad_()
    found = ClassificationLoss(7, "asl", multi_label=True)(ours, SEVERAL)
    torch.testing.assert_close(found, (expected.sum() / 5).float())
    gradients = torch.autograd.grad(expected.sum() / 5, logits)[0], torch.autograd.grad(found, ours)[0]
    torch.testing.assert_close(gradients[1], gradients[0].float(), atol=1e-6, rtol=1e-4)
    weighted = ClassificationLoss(7, "asl", class_weights=WEIGHTS, multi_label=True)(LOGITS, SEVERAL)
    torch.testing.assert_close(weighted, ((expected * torch.tensor(WEIGHTS)).sum() / 5).float())

    targets = SEVERAL.double() * 0.9 + 0.1 / 7
    entropy = -(targets * p.log() + (1 - targets) * (1 - p).log()).mean()
    for kind in ("ce", "bce"):
        loss = ClassificationLoss(7, kind, 0.1, multi_label=True)
        torch.testing.assert_close(loss(LOGITS, SEVERAL), entropy.float())
        # Soft targets, such as those of mixup, are not smoothed further.
        torch.testing.assert_close(loss(LOGITS, targets.float()), entropy.float())


class Unbalanced(Noise):
    """A data module that asks for a balanced loss."""

    class_weights = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 3.0, 1.0])


def test_data_may_balance_the_loss():
    module = build(label_smoothing=0.0)
    train(module, Unbalanced(), max_epochs=1, limit_train_batches=1)
    each = torch.nn.functional.cross_entropy(LOGITS, LABELS, reduction="none")
    torch.testing.assert_close(module.loss(LOGITS, LABELS), (Unbalanced.class_weights[LABELS] * each).mean())
    # The next training has data of its own.
    train(module, Noise(), max_epochs=1, limit_train_batches=1)
    torch.testing.assert_close(module.loss(LOGITS, LABELS), each.mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_leave_class_weights_in_single_precision(dtype):
    loss = ClassificationLoss(3, class_weights=[0.1, 0.2, 0.7])
    before = {name: buffer.clone() for name, buffer in loss.named_buffers()}
    loss.to(dtype)
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in loss.named_buffers())


def test_class_weights_may_be_a_tensor(recwarn):
    assert ClassificationLoss(2, class_weights=torch.tensor([1, 3])).weights.tolist() == [1.0, 3.0]
    assert not recwarn.list
