"""Metrics of each class (confusion matrix, precision, recall, F1, average precision) and calibration error.

`labels.py` chooses among these metrics: images of one label have other metrics than images of several labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors


class ClassMetrics(NamedTuple):
    """The number of images of each class, int64 (C,), and metrics, float64 (C,), which are NaN where undefined.

    `precision` is undefined for a class that is never predicted, `recall` for a class without images, `f1` for a class
    that is never predicted and has no images.
    """

    count: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray


class MultiLabelMetrics(NamedTuple):
    """Metrics of each class of multi-label images: `count`, the number of images, int64 (C,); all others float64 (C,).

    A class is predicted if its probability reaches the `threshold`. An undefined metric is NaN: `recall` and
    `average_precision` for a class without images, `precision` for a class that is never predicted, `f1` for a class
    that is never predicted and has no images.
    """

    count: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    average_precision: np.ndarray
    threshold: np.ndarray

    def means(self) -> dict[str, float]:
        """Return 'map' (mean average precision) and 'f1' (mean F1), both over the classes that have images."""
        known = self.count > 0
        values = {"map": self.average_precision, "f1": self.f1}
        return {name: float(value[known].mean()) if known.any() else np.nan for name, value in values.items()}


AnyClassMetrics = ClassMetrics | MultiLabelMetrics


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Count images of each class (rows) by predicted class (columns): int64 (N,) each -> int64 (classes, classes)."""
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)


def class_metrics(confusion: np.ndarray) -> ClassMetrics:
    """Compute precision, recall and F1, 2 right / (images + predictions), of each class of a confusion matrix."""
    right, count, guesses = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    # An undefined metric is 0 / 0, for which NumPy returns NaN and warns: switch the warning off. torchmetrics is not
    # used here, since it returns zero for an undefined metric.
    with np.errstate(invalid="ignore"):
        return ClassMetrics(count, right / guesses, right / count, 2 * right / (count + guesses))


def calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    """Compute the expected calibration error (Guo et al. 2017, arXiv 1706.04599, eq. 3) in bins of equal width.

    Args:
        confidence: The probability of the predicted class, (N,).
        right: Whether the prediction was right, (N,).
        bins: The number of bins.
    """
    # As in the paper, bin m = 1, 2, ... has the confidences above (m - 1) / bins, up to and including m / bins.
    # torchmetrics is not used here, since it puts a confidence of 1 into an additional bin.
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    return float(np.abs(np.bincount(place, right - confidence, bins)).sum() / len(confidence))


def multi_label_metrics(
    probabilities: np.ndarray | Tensor, labels: np.ndarray | Tensor, thresholds: Sequence[float] | None = None
) -> MultiLabelMetrics:
    """Compute the metrics of each class where images have several labels.

    Let s_1, s_2, ... be the different probabilities of a class, from high to low, and P_n and R_n precision and recall
    at the threshold s_n, with R_0 = 0. Average precision is the sum over n of (R_n - R_(n-1)) P_n, as in scikit-learn's
    `average_precision_score`.

    Args:
        probabilities: (N, classes).
        labels: Bool, or 0 and 1, (N, classes).
        thresholds: One threshold for each class. None takes for each class the threshold with the highest F1 on these
            images, the highest of several best ones; a class without images gets 0.5. Such a threshold is midway
            between the lowest probability that reaches it and the next lower probability (0 if there is none).
    """
    probabilities, labels = np.asarray(probabilities), np.asarray(labels).astype(bool, copy=False)
    # Convert one class at a time, because a copy of all probabilities may take gigabytes.
    curves = [_curve(scores.astype(np.float64), own) for scores, own in zip(probabilities.T, labels.T, strict=True)]
    chosen = np.array([best for _, best in curves] if thresholds is None else thresholds)
    predicted = probabilities >= chosen
    right, count, guesses = (predicted & labels).sum(0), labels.sum(0), predicted.sum(0)
    with np.errstate(invalid="ignore"):
        rates = right / guesses, right / count, 2 * right / (count + guesses)
    return MultiLabelMetrics(count, *rates, np.array([precision for precision, _ in curves]), chosen)


def _curve(scores: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Compute the average precision of a class, and the threshold of its best F1."""
    if not labels.any():
        return np.nan, 0.5
    order = np.argsort(-scores, kind="stable")
    scores = scores[order]
    # Images with equal scores reach a threshold together, so a threshold can only follow the last of equal scores.
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    found, scores = labels[order].cumsum()[last], scores[last]
    average = np.sum(np.diff(found, prepend=0) * found / (last + 1)) / found[-1]
    best = np.argmax(found / (last + 1 + found[-1]))
    return float(average), float((scores[best] + np.append(scores, 0)[best + 1]) / 2)


class MultiLabelScores(Metric):
    """Mean average precision 'map' and mean F1 'f1' of an epoch, exact on any number of devices.

    The probabilities and labels of all images of the epoch are kept in the memory of the CPU.

    Attributes:
        thresholds: One threshold for each class. None lets `multi_label_metrics` choose the thresholds.
        classes: The metrics of each class, after `compute`.
    """

    full_state_update: bool | None = False

    def __init__(self, thresholds: Sequence[float] | None = None) -> None:
        # NCCL gathers only tensors on GPUs, so torchmetrics' option `compute_on_cpu` fails: `_gather` moves tensors
        # instead.
        super().__init__(dist_sync_fn=self._gather)
        self.thresholds: Sequence[float] | None = thresholds
        self.classes: MultiLabelMetrics | None = None
        for name in ("probabilities", "labels"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add the logits and labels of a batch, both (B, classes)."""
        # Also add empty batches, so that every process has states to gather.
        self.probabilities.append(logits.float().sigmoid().cpu())
        self.labels.append(labels.view(logits.shape).to(torch.uint8).cpu())

    def compute(self) -> dict[str, float]:
        """Return 'map' and 'f1', which are NaN without images."""
        if not len(self.labels):
            return dict.fromkeys(("map", "f1"), np.nan)
        probabilities, labels = (dim_zero_cat(state).numpy() for state in (self.probabilities, self.labels))
        self.classes = multi_label_metrics(probabilities, labels, self.thresholds)
        return self.classes.means()

    def _gather(self, state: Tensor, group: Any = None) -> list[Tensor]:
        return [part.cpu() for part in gather_all_tensors(state.to(self.device), group)]
