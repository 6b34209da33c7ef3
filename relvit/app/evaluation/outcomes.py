"""Results of a test: confusion matrix, precision, recall and F1 of each class, calibration error, mistakes.

The metrics of an epoch in training are in `relvit.app.training.metrics`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.app.training.labels import Labels, MultiLabelMetrics, classes_above, multi_label_metrics


class ClassMetrics(NamedTuple):
    """The number of images of each class, int64 (C,), and metrics, float64 (C,), which are NaN where undefined.

    `precision` is undefined where a class is never predicted, `recall` where the class has no images, `f1` where both
    are the case.
    """

    count: np.ndarray
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray


AnyClassMetrics = ClassMetrics | MultiLabelMetrics


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Count images of each class (rows) by predicted class (columns): int64 (N,), int64 (N,) -> int64 (C, C)."""
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)


def class_metrics(confusion: np.ndarray) -> ClassMetrics:
    """Compute precision, recall and F1, 2 right / (images + predictions), of each class of a confusion matrix."""
    right, count, guesses = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    # torchmetrics cannot tell an undefined metric from one that is zero.
    with np.errstate(invalid="ignore"):
        return ClassMetrics(count, right / guesses, right / count, 2 * right / (count + guesses))


def calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    """Compute the expected calibration error (Guo et al. 2017, arXiv 1706.04599, eq. 3) in bins of equal width.

    Args:
        confidence: The probability of the predicted class, (N,).
        right: Whether the prediction was right, (N,).
        bins: The number of bins.
    """
    # The paper's bins are ((m - 1) / bins, m / bins]; torchmetrics gives a confidence of 1 a bin of its own.
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    return float(np.abs(np.bincount(place, right - confidence, bins)).sum() / len(confidence))


class Mistake(NamedTuple):
    """A wrong prediction.

    Attributes:
        weight: How bad the mistake is.
        position: The position of the image among those of the test.
        true: The names of the image's classes.
        predicted: The names of the predicted classes.
        caption: The prediction in the words of a figure.
    """

    weight: float
    position: int
    true: str
    predicted: str
    caption: str


class Outcomes(Protocol):
    """Protocol of test results: the numbers that a test keeps of each image, and the figures that reports compute.

    One class serves images of one label, another one images of several labels, of which `right`, `calibration` and
    `confusion` return nothing. The numbers are float64 rows (rows, N) with a column for each image, which the processes
    of a test can gather.

    Attributes:
        mistakes_by: The column by which a table of mistakes is sorted.
        mistakes_title: The title of the pictures of mistakes.
    """

    mistakes_by: str
    mistakes_title: str

    def keep(self, probabilities: Tensor, labels: Tensor) -> np.ndarray:
        """Return the rows of a batch: probabilities (B, C) and labels (B,) or (B, C) on the CPU."""

    def right(self, kept: np.ndarray) -> np.ndarray | None:
        """Return whether each image was right, bool (N,)."""

    def calibration(self, kept: np.ndarray) -> dict[str, float]:
        """Return the 'calibration_error'."""
        return {}

    def confusion(self, kept: np.ndarray, num_classes: int) -> np.ndarray | None:
        """Compute the confusion matrix."""

    def class_metrics(self, kept: np.ndarray, num_classes: int) -> AnyClassMetrics:
        """Compute the metrics of each class."""

    def score(self, kept: np.ndarray) -> float:
        """Compute accuracy, or mean average precision where images have several labels."""

    def mistakes(self, kept: np.ndarray, names: Sequence[str]) -> Iterator[Mistake]:
        """Yield the mistakes, given the names of the classes."""


def outcomes_of(labels: Labels) -> Outcomes:
    """Return what a test keeps for a classifier with these labels."""
    return OneLabelOutcomes() if labels.thresholds is None else SeveralLabelsOutcomes(labels.thresholds)


class OneLabelOutcomes(Outcomes):
    """The outcomes of images of one label: rows of label, predicted class and probability of this class."""

    mistakes_by = "probability"
    mistakes_title = "most confident mistakes"

    def keep(self, probabilities: Tensor, labels: Tensor) -> np.ndarray:
        probability, predicted = probabilities.double().max(-1)
        return torch.stack((labels.double(), predicted.double(), probability)).numpy()

    def right(self, kept: np.ndarray) -> np.ndarray:
        return kept[0] == kept[1]

    def calibration(self, kept: np.ndarray) -> dict[str, float]:
        return {"calibration_error": calibration_error(kept[2], self.right(kept))}

    def confusion(self, kept: np.ndarray, num_classes: int) -> np.ndarray:
        return confusion_matrix(*kept[:2].astype(np.int64), num_classes)

    def class_metrics(self, kept: np.ndarray, num_classes: int) -> ClassMetrics:
        return class_metrics(self.confusion(kept, num_classes))

    def score(self, kept: np.ndarray) -> float:
        return float(self.right(kept).mean())

    def mistakes(self, kept: np.ndarray, names: Sequence[str]) -> Iterator[Mistake]:
        for position in np.flatnonzero(~self.right(kept)).tolist():
            label, predicted, probability = kept[:, position].tolist()
            guess = names[int(predicted)]
            yield Mistake(probability, position, names[int(label)], guess, f"{probability:.1%} {guess}")


class SeveralLabelsOutcomes(Outcomes):
    """The outcomes of images of several labels: C rows of labels, then C rows of probabilities.

    Args:
        thresholds: See `relvit.app.training.SeveralLabels`.
    """

    mistakes_by = "loss"
    mistakes_title = "mistakes of the highest loss"

    def __init__(self, thresholds: Sequence[float]) -> None:
        self.thresholds = thresholds

    def keep(self, probabilities: Tensor, labels: Tensor) -> np.ndarray:
        return torch.cat((labels.double(), probabilities.double()), 1).T.numpy()

    def class_metrics(self, kept: np.ndarray, num_classes: int) -> MultiLabelMetrics:
        labels, probabilities = np.split(kept, 2)
        return multi_label_metrics(probabilities.T, labels.T > 0, self.thresholds)

    def score(self, kept: np.ndarray) -> float:
        return self.class_metrics(kept, len(self.thresholds)).means()["map"]

    def mistakes(self, kept: np.ndarray, names: Sequence[str]) -> Iterator[Mistake]:
        labels, probabilities = (torch.from_numpy(rows.T) for rows in np.split(kept, 2))
        losses = F.binary_cross_entropy(probabilities, labels, reduction="none").mean(1).tolist()
        true, found = classes_above(labels, [0.5] * len(names)), classes_above(probabilities, self.thresholds)
        for position, (loss, label, predicted) in enumerate(zip(losses, true, found, strict=True)):
            if set(label) != set(predicted):
                texts = [";".join(names[index] for index in each) for each in (label, predicted)]
                yield Mistake(loss, position, *texts, f"predicted: {texts[1]}")
