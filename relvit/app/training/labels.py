"""One label per image, or several (multi-label): probabilities, predicted classes, thresholds and metrics of training.

The metrics of a test's report, such as the confusion matrix, are in `relvit.app.evaluation.outcomes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.utilities import dim_zero_cat


class MultiLabelMetrics(NamedTuple):
    """Metrics of each class of multi-label images: `count`, its number of images, int64 (C,); the others float64 (C,).

    An image gets a class where the probability reaches the `threshold`. An undefined metric is NaN: `recall` and
    `average_precision` where a class has no images, `precision` where it is never predicted, `f1` where both are the
    case.
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


class Labels(Protocol):
    """The number of labels of an image, one or several, and everything that depends on it.

    Attributes:
        score: The metric that chooses the best checkpoint.
        loss: The loss of evaluation, as `ClassificationLoss` names it.
        activation: The Python code that turns logits into probabilities.
        thresholds: The probability of each class from which on an image has this class. None: an image has its most
            probable class.
    """

    score: str
    loss: str
    activation: str
    thresholds: list[float] | None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Compute the probabilities (B, C) of logits: float64 if the logits are float64, else float32.

        Raises:
            ValueError: A probability is not finite.
        """

    def mean_logits(self, logits: Tensor) -> Tensor:
        """Compute the logits (B, C) of the mean of two probabilities from the logits (2, B, C) of both."""

    def classes(self, probabilities: Tensor, most: int) -> list[list[int]]:
        """List the predicted classes of each image (B, C), most probable first; without thresholds these are `most`."""

    def metrics(self, num_classes: int, training: bool, mixed: bool) -> dict[str, Metric]:
        """Create the metrics of an epoch, apart from its loss; the images of a training may be mixed."""

    def choose_thresholds(self, metrics: MetricCollection, choose: bool) -> None:
        """Let metrics choose thresholds on the images that they see, or let them use the present thresholds."""

    def chosen(self, metrics: MetricCollection) -> Labels:
        """Return these labels with the thresholds that the metrics have chosen."""
        return self

    def restored(self, thresholds: list[float] | None) -> Labels:
        """Return these labels with the thresholds of a checkpoint, if it has some."""
        return self

    def record(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's description that belong to the labels."""
        return {}

    def columns(self, most: int) -> list[str]:
        """Name the columns of a table of predictions, which `cells` fills."""

    def cells(self, found: Sequence[tuple[str, float]]) -> list[str]:
        """Format names and probabilities of the classes of an image as the cells of a row."""


@dataclass(frozen=True)
class OneLabel(Labels):
    """Images of one class each: a softmax gives the probabilities, and the most probable class is predicted."""

    score = "acc1"
    loss = "ce"
    activation = "softmax(-1)"
    thresholds: list[float] | None = field(default=None, init=False)

    def probabilities(self, logits: Tensor) -> Tensor:
        return _finite(_at_least_single(logits).softmax(-1))

    def mean_logits(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).logsumexp(0) - math.log(2)

    def classes(self, probabilities: Tensor, most: int) -> list[list[int]]:
        return probabilities.topk(most).indices.tolist()

    def metrics(self, num_classes: int, training: bool, mixed: bool) -> dict[str, Metric]:
        """Create top-1 accuracy 'acc1' and, with five classes or more, top-5 accuracy 'acc5'.

        If images are mixed by mixup or CutMix, the larger part is taken as the class, in 'acc1_mixed' and 'acc5_mixed'.
        """
        end = "_mixed" if mixed else ""
        return {
            f"acc{k}{end}": MulticlassAccuracy(num_classes, top_k=k, average="micro")
            for k in (1, 5)
            if k <= num_classes
        }

    def columns(self, most: int) -> list[str]:
        ranks = ("", *range(2, most + 1))
        return [f"{column}{rank}" for rank in ranks for column in ("class", "probability")]

    def cells(self, found: Sequence[tuple[str, float]]) -> list[str]:
        return list(chain.from_iterable((name, f"{probability:.6f}") for name, probability in found))


@dataclass(frozen=True)
class SeveralLabels(Labels):
    """Images of any number of classes: a sigmoid gives each class a probability, and a threshold decides.

    Args:
        thresholds: One threshold for each class; a validation chooses them.
    """

    thresholds: list[float]

    score = "map"
    loss = "bce"
    activation = "sigmoid()"

    def probabilities(self, logits: Tensor) -> Tensor:
        return _finite(_at_least_single(logits).sigmoid())

    def mean_logits(self, logits: Tensor) -> Tensor:
        return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

    def classes(self, probabilities: Tensor, most: int) -> list[list[int]]:
        return classes_above(probabilities, self.thresholds)

    def metrics(self, num_classes: int, training: bool, mixed: bool) -> dict[str, Metric]:
        """Create mean average precision 'map' and mean F1 'f1', see `MultiLabelScores`; a training has neither."""
        return {} if training else {"scores": MultiLabelScores(self.thresholds)}

    def choose_thresholds(self, metrics: MetricCollection, choose: bool) -> None:
        metrics["scores"].thresholds = None if choose else self.thresholds

    def chosen(self, metrics: MetricCollection) -> SeveralLabels:
        classes = metrics["scores"].classes
        return self if classes is None else SeveralLabels(classes.threshold.tolist())

    def restored(self, thresholds: list[float] | None) -> SeveralLabels:
        return self if thresholds is None else SeveralLabels(thresholds)

    def record(self) -> dict[str, Any]:
        return {"thresholds": self.thresholds}

    def columns(self, most: int) -> list[str]:
        return ["label", "probability"]

    def cells(self, found: Sequence[tuple[str, float]]) -> list[str]:
        return [";".join(name for name, _ in found), ";".join(f"{probability:.6f}" for _, probability in found)]


def labels_of(thresholds: list[float] | None) -> Labels:
    """Return the labels of images of several classes with these thresholds, or of one class where there are none."""
    return OneLabel() if thresholds is None else SeveralLabels(thresholds)


def are_thresholds(value: Any, num_classes: int) -> bool:
    """Return whether a value that was read from a file is a list of numbers in 0 ... 1, one for each class."""
    return (
        isinstance(value, list)
        and len(value) == num_classes
        and all(isinstance(each, float | int) and not isinstance(each, bool) and 0 <= each <= 1 for each in value)
    )


def _at_least_single(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _finite(probabilities: Tensor) -> Tensor:
    if not probabilities.isfinite().all():
        raise ValueError(
            "the model computes probabilities that are not a number: its weights, its temperature, or mean and std of "
            "the images are broken, or its precision is too low"
        )
    return probabilities


def classes_above(probabilities: Tensor, thresholds: Sequence[float]) -> list[list[int]]:
    """List the classes of each image (B, C) that reach their thresholds, the most probable first."""
    # A threshold may lie midway between two neighbouring floats. Not every accelerator has doubles to compare them.
    probabilities = probabilities.cpu().double()
    found = []
    for row in probabilities:
        above = (row >= torch.tensor(thresholds, dtype=torch.float64)).nonzero()[:, 0]
        found.append(above[row[above].argsort(descending=True, stable=True)].tolist())
    return found


def multi_label_metrics(
    probabilities: np.ndarray, labels: np.ndarray, thresholds: Sequence[float] | None = None
) -> MultiLabelMetrics:
    """Compute the metrics of each class where images have several labels.

    Average precision is the sum over the scores s_n, from high to low, of (R_n - R_(n-1)) P_n, with precision P_n and
    recall R_n at the threshold s_n, as scikit-learn's `average_precision_score` computes it.

    Args:
        probabilities: (N, C).
        labels: Bool (N, C).
        thresholds: One threshold for each class. None takes the thresholds of the best F1 on these images. Such a
            threshold is midway between the lowest score to be included and the next one below it; it is the highest of
            equally good ones, and 0.5 for a class without images.
    """
    curves = [_curve(*column) for column in zip(probabilities.T.astype(np.float64), labels.T, strict=True)]
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
    # A threshold includes all images of equal scores or none, so only the last of them counts.
    last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True))
    found, scores = labels[order].cumsum()[last], scores[last]
    average = np.sum(np.diff(found, prepend=0) * found / (last + 1)) / found[-1]
    best = np.argmax(found / (last + 1 + found[-1]))
    return float(average), float((scores[best] + np.append(scores, 0)[best + 1]) / 2)


class MultiLabelScores(Metric):
    """Mean average precision 'map' and mean F1 'f1' of an epoch, exact on any number of devices.

    Attributes:
        thresholds: One threshold for each class. None lets `multi_label_metrics` choose them.
        classes: The metrics of each class, after `compute`.
    """

    full_state_update: bool | None = False

    def __init__(self, thresholds: Sequence[float] | None = None) -> None:
        super().__init__()
        self.thresholds: Sequence[float] | None = thresholds
        self.classes: MultiLabelMetrics | None = None
        for name in ("probabilities", "labels"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add the logits and labels of a batch, both (B, C)."""
        # Empty batches are added, too, so that all processes have states to gather.
        self.probabilities.append(logits.float().sigmoid())
        self.labels.append(labels.view(logits.shape).to(torch.uint8))

    def compute(self) -> dict[str, float]:
        """Return 'map' and 'f1', which are NaN without images."""
        if not len(self.labels):
            return dict.fromkeys(("map", "f1"), np.nan)
        probabilities, labels = (dim_zero_cat(state).cpu().numpy() for state in (self.probabilities, self.labels))
        self.classes = multi_label_metrics(probabilities, labels.astype(bool), self.thresholds)
        return self.classes.means()
