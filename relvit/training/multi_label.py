"""Multi-label classification: probabilities, average precision and F1 of each class, thresholds of the best F1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class MultiLabelMetrics(NamedTuple):
    """Metrics of each class, (C,): int64 `count`, its images, else float64; NaN where undefined.

    An image gets a class where the probability reaches the `threshold`. `recall` and `average_precision` are undefined
    where a class has no images, `precision` where it is never predicted, `f1` where both.
    """

    count: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    average_precision: np.ndarray
    threshold: np.ndarray

    def means(self) -> dict[str, float]:
        """Return 'map', the mean average precision, and 'f1', means over the classes that have images."""
        known = self.count > 0
        values = {"map": self.average_precision, "f1": self.f1}
        return {name: float(value[known].mean()) if known.any() else np.nan for name, value in values.items()}


def multi_label_metrics(
    probabilities: np.ndarray, labels: np.ndarray, thresholds: Sequence[float] | None = None
) -> MultiLabelMetrics:
    """Compute metrics of each class of a multi-label classifier.

    Average precision is the sum over the scores s_n, from high to low, of (R_n - R_(n-1)) P_n, with precision and
    recall at the threshold s_n, as scikit-learn's `average_precision_score`.

    Args:
        probabilities: (N, C).
        labels: bool (N, C).
        thresholds: one of each class. None takes those of the best F1 on these images: midway between the lowest
            score to be included and the next one below it; of equal ones the highest; 0.5 for a class without images.
    """
    curves = [_curve(*column) for column in zip(probabilities.T.astype(np.float64), labels.T, strict=True)]
    chosen = np.array([best for _, best in curves] if thresholds is None else thresholds)
    predicted = probabilities >= chosen
    right, count, guesses = (predicted & labels).sum(0), labels.sum(0), predicted.sum(0)
    with np.errstate(invalid="ignore"):
        rates = right / guesses, right / count, 2 * right / (count + guesses)
    return MultiLabelMetrics(count, *rates, np.array([precision for precision, _ in curves]), chosen)


def _curve(scores: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """The average precision of a class, and its threshold of the best F1."""
    if not labels.any():
        return np.nan, 0.5
    order = np.argsort(-scores, kind="stable")
    scores = scores[order]
    # Images of equal scores have one threshold: at the last of them.
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    found, scores = labels[order].cumsum()[last], scores[last]
    average = np.sum(np.diff(found, prepend=0) * found / (last + 1)) / found[-1]
    best = np.argmax(found / (last + 1 + found[-1]))
    return float(average), float((scores[best] + np.append(scores, 0)[best + 1]) / 2)


class MultiLabelScores(Metric):
    """Mean average precision 'map' and mean F1 'f1' of an epoch, exact, of each image once on any number of devices.

    Attributes:
        thresholds: of the classes; None chooses them by `multi_label_metrics`.
        classes: the metrics of each class, once computed.
    """

    full_state_update: bool | None = False

    def __init__(self) -> None:
        super().__init__()
        self.thresholds: Sequence[float] | None = None
        self.classes: MultiLabelMetrics | None = None
        for name in ("probabilities", "labels"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch, (B, C) both; an empty one, too, so that all processes have the same states to gather."""
        self.probabilities.append(to_probabilities(logits, multi_label=True))
        self.labels.append(labels.view(logits.shape).to(torch.uint8))

    def compute(self) -> dict[str, float]:
        """Return 'map' and 'f1'; NaN without images."""
        if not len(self.labels):
            return dict.fromkeys(("map", "f1"), np.nan)
        probabilities, labels = (dim_zero_cat(state).cpu().numpy() for state in (self.probabilities, self.labels))
        self.classes = multi_label_metrics(probabilities, labels.astype(bool), self.thresholds)
        return self.classes.means()


def to_probabilities(logits: Tensor, multi_label: bool) -> Tensor:
    """Compute float32 probabilities (B, C) of logits: by softmax, of a multi-label classifier by sigmoid."""
    return logits.float().sigmoid() if multi_label else logits.float().softmax(-1)


def classes_above(probabilities: Tensor, thresholds: Sequence[float]) -> list[list[int]]:
    """List the classes of each image (B, C) that reach their thresholds, the most probable first."""
    # In double precision, on the CPU: a threshold may be midway between two floats next to each other.
    probabilities = probabilities.cpu().double()
    found = []
    for row in probabilities:
        above = (row >= torch.tensor(thresholds, dtype=torch.float64)).nonzero()[:, 0]
        found.append(above[row[above].argsort(descending=True, stable=True)].tolist())
    return found
