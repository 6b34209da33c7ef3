"""Classification loss: cross-entropy, binary cross-entropy or ASL, of labels or soft targets, with label smoothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from timm.loss import AsymmetricLossMultiLabel
from torch import Tensor

from relvit.app.utils.shown_text import counted
from relvit.utils.constants import KeepConstants
from relvit.utils.messages import check_choice

# A new name needs a branch in `ClassificationLoss.forward`, a line in `_training_legend` of `callbacks/history.py`, and
# a word in the docstring of `ImageClassifier`.
Loss = Literal["ce", "bce", "asl"]


def soft_targets(labels: Tensor, num_classes: int, smoothing: float = 0.0) -> Tensor:
    """Convert labels (B,) to target distributions (B, num_classes), float32, each of which sums to one.

    The target of the label is 1 - smoothing + smoothing / num_classes, of every other class smoothing / num_classes
    (Szegedy et al. 2016, arXiv 1512.00567, section 7). Labels of multi-label images, bool (B, num_classes), are
    smoothed in the same way; their targets do not sum to one.
    """
    hot = labels if labels.ndim == 2 else F.one_hot(labels, num_classes)
    return hot.float() * (1.0 - smoothing) + smoothing / num_classes


def evaluation_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean cross-entropy of labels (B,), or the mean binary cross-entropy of several labels (B, classes).

    Labels are not smoothed and classes are not weighted, whatever the training's loss is.
    """
    if labels.ndim == 1:
        return F.cross_entropy(logits.float(), labels)
    return F.binary_cross_entropy_with_logits(logits.float(), labels.float())


class ClassificationLoss(KeepConstants):
    """Cross-entropy, or binary cross-entropy class by class (DeiT III, Touvron et al. 2022, arXiv 2204.07118).

    The loss is the mean over the images, and with binary cross-entropy also over the classes. Multi-label images can
    have the asymmetric loss instead (Ridnik et al. 2021, arXiv 2009.14119, eq. 2 to 7), which is summed over the
    classes: gamma is 1 for present classes and 4 for absent classes, and the probabilities of absent classes are
    lowered by the margin 0.05.

    With class weights w_c, the cross-entropy of an image with targets t_c and probabilities p_c is
    `-sum_c w_c t_c log p_c`. The sum over the images is divided by their number. (PyTorch divides the sum by the sum of
    the weights, if targets are labels.) So the mean over the batches of several devices, or over accumulated batches,
    equals the loss of one larger batch.

    Args:
        num_classes, kind, class_weights, multi_label: See `ImageClassifier`, where `kind` has the name `loss`.
        smoothing: See `label_smoothing` of `ImageClassifier`; soft targets are not smoothed further.
        threshold: See `bce_threshold` of `ImageClassifier`.

    Raises:
        ValueError: The kind is unknown, 'asl' is given for images of one label, numbers are out of range, or every
            smoothed class would exceed the threshold.
    """

    def __init__(
        self,
        num_classes: int,
        kind: Loss = "ce",
        smoothing: float = 0.0,
        threshold: float | None = None,
        class_weights: Sequence[float] | None = None,
        multi_label: bool = False,
    ) -> None:
        super().__init__()
        check_choice("loss", kind, get_args(Loss))
        if kind == "asl" and not multi_label:
            raise ValueError(
                "loss 'asl' is for images with several labels: set multi_label (on the command line label_separator)"
            )
        kind = "bce" if kind == "ce" and multi_label else kind
        if not 0 <= smoothing < 1:
            raise ValueError(f"label_smoothing must be in 0 <= x < 1, got {smoothing}")
        if threshold is not None and kind != "bce":
            raise ValueError(f"bce_threshold is for loss 'bce', got {threshold} with loss {kind!r}: leave it out")
        if threshold is not None and not smoothing / num_classes <= threshold < 1:
            raise ValueError(
                f"bce_threshold must be at least label_smoothing / num_classes = {smoothing / num_classes:g}, or every "
                f"class would count as present, and below 1, got {threshold}"
            )
        if class_weights is not None and not all(0 < weight < math.inf for weight in class_weights):
            raise ValueError(f"class_weights must be positive and finite, got {list(class_weights)}")
        self.num_classes = num_classes
        self.kind = kind
        self.smoothing = smoothing
        self.threshold = threshold
        self._data_decides = class_weights is None
        # Keep this buffer out of the state dict: checkpoints already hold the class weights as an argument.
        self.register_buffer("weights", self._weights_of(class_weights), persistent=False)

    def balance(self, weights: Sequence[float] | Tensor | None) -> None:
        """Take the class weights (num_classes,) of a training's data; None: these data have none.

        Raises:
            ValueError: There are class weights of the data and of the argument `class_weights`; or the number of
                weights is not `num_classes`.
        """
        if self._data_decides:
            self.weights: Tensor | None = self._weights_of(weights)
        elif weights is not None:
            raise ValueError("the data balances the loss (balance='loss'): leave out class_weights")

    def _weights_of(self, weights: Sequence[float] | Tensor | None) -> Tensor | None:
        if weights is not None and len(weights) != self.num_classes:
            raise ValueError(
                f"class_weights holds {counted(len(weights), 'number')}; give {self.num_classes}, one for each class"
            )
        return None if weights is None else torch.as_tensor(weights, dtype=torch.float32)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the float32 scalar loss of logits (B, num_classes).

        Targets are labels, int64 (B,), labels of multi-label images, bool (B, num_classes), or soft targets, float
        (B, num_classes).
        """
        logits = logits.float()
        if not targets.is_floating_point():
            targets = soft_targets(targets, self.num_classes, self.smoothing)
        # PyTorch computes binary cross-entropy in the dtype of the targets. With precision bf16-true or 16-true soft
        # targets are in half precision, so convert them.
        targets = targets.float()
        if self.kind == "asl":
            return AsymmetricLossMultiLabel(weight=self.weights)(logits, targets)
        if self.kind == "ce":
            return F.cross_entropy(logits, targets, weight=self.weights)
        if self.threshold is not None:
            targets = (targets > self.threshold).float()
        return F.binary_cross_entropy_with_logits(logits, targets, weight=self.weights)
