"""One label per image, or several: all that depends on it, from the probabilities of logits to metrics and tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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

from relvit.training.class_metrics import ClassMetrics, calibration_error, class_metrics, confusion_matrix


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


AnyClassMetrics = ClassMetrics | MultiLabelMetrics


class Mistake(NamedTuple):
    """A wrong prediction: how bad it is (the worst first), position of the image, names of its classes, a caption."""

    weight: float
    position: int
    true: str
    predicted: str
    caption: str


class Labels(Protocol):
    """How many labels an image has, and what depends on that.

    Outcomes are what a test keeps of its images: float64 rows (rows, N), a column for each image.

    Attributes:
        score: the metric by which the best checkpoint is chosen.
        loss: the loss of evaluation, as `ClassificationLoss` names it.
        activation: what makes probabilities of logits, in Python.
        mistakes_by: the column that a table of mistakes is sorted by.
        mistakes_title: the title of their pictures.
        thresholds: the probability of each class from which on an image has it; None: the most probable class counts.
    """

    score: str
    loss: str
    activation: str
    mistakes_by: str
    mistakes_title: str
    thresholds: list[float] | None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Compute probabilities (B, C) of logits: float64 of float64, else float32."""

    def mean_logits(self, logits: Tensor) -> Tensor:
        """Compute the logits (B, C) of the mean of two probabilities, of their logits (2, B, C)."""

    def classes(self, probabilities: Tensor, most: int) -> list[list[int]]:
        """List the classes found of each image (B, C), the most probable first; `most` of them without thresholds."""

    def metrics(self, num_classes: int, training: bool, mixed: bool) -> dict[str, Metric]:
        """Create the metrics of an epoch apart from its loss; of training by images that may be mixed."""

    def choose_thresholds(self, metrics: MetricCollection, choose: bool) -> None:
        """Let metrics choose thresholds on their images, or use these."""

    def chosen(self, metrics: MetricCollection) -> Labels:
        """Return these labels with the thresholds that metrics have chosen."""
        return self

    def fitted(self, outcomes: np.ndarray) -> Labels:
        """Return these labels with the thresholds of the best F1 on these outcomes."""
        return self

    def restored(self, thresholds: list[float] | None) -> Labels:
        """Return these labels with the thresholds in the description of a file, if there are any."""
        return self

    def record(self) -> dict[str, Any]:
        """Return what the description in a file says of the labels."""
        return {}

    def outcomes(self, probabilities: Tensor, labels: Tensor) -> np.ndarray:
        """Return the outcomes of a batch: probabilities (B, C), labels (B,) or (B, C), on the CPU."""

    def right(self, outcomes: np.ndarray) -> np.ndarray | None:
        """Return whether each image was right, bool (N,); None with several labels."""

    def calibration(self, outcomes: np.ndarray) -> dict[str, float]:
        """Return the 'calibration_error' of images of one label."""
        return {}

    def confusion(self, outcomes: np.ndarray, num_classes: int) -> np.ndarray | None:
        """Count images of each class (rows) by predicted class (columns); None with several labels."""

    def class_metrics(self, outcomes: np.ndarray, num_classes: int) -> AnyClassMetrics:
        """Compute the metrics of each class."""

    def total(self, outcomes: np.ndarray) -> float:
        """Compute `score` over all images."""

    def mistakes(self, outcomes: np.ndarray, names: Sequence[str]) -> Iterator[Mistake]:
        """Yield the images to which others than their classes were given."""

    def columns(self, most: int) -> list[str]:
        """Name the columns of `cells`."""

    def cells(self, found: Sequence[tuple[str, float]]) -> list[str]:
        """Write names and probabilities of the classes found in an image as cells of a table."""


@dataclass(frozen=True)
class OneLabel(Labels):
    """Each image has one class: probabilities by softmax, of which the highest counts."""

    score = "acc1"
    loss = "ce"
    activation = "softmax(-1)"
    mistakes_by = "probability"
    mistakes_title = "most confident mistakes"
    thresholds: list[float] | None = field(default=None, init=False)

    def probabilities(self, logits: Tensor) -> Tensor:
        return _at_least_single(logits).softmax(-1)

    def mean_logits(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).logsumexp(0) - math.log(2)

    def classes(self, probabilities: Tensor, most: int) -> list[list[int]]:
        return probabilities.topk(most).indices.tolist()

    def metrics(self, num_classes: int, training: bool, mixed: bool) -> dict[str, Metric]:
        """Create top-1 accuracy 'acc1' and, with five classes or more, 'acc5'.

        Of images mixed by mixup or CutMix the class of the larger part counts, as 'acc1_mixed' and 'acc5_mixed'.
        """
        end = "_mixed" if mixed else ""
        return {
            f"acc{k}{end}": MulticlassAccuracy(num_classes, top_k=k, average="micro")
            for k in (1, 5)
            if k <= num_classes
        }

    def outcomes(self, probabilities: Tensor, labels: Tensor) -> np.ndarray:
        """Return rows of label, predicted class and its probability."""
        probability, predicted = probabilities.double().max(-1)
        return torch.stack((labels.double(), predicted.double(), probability)).numpy()

    def right(self, outcomes: np.ndarray) -> np.ndarray:
        return outcomes[0] == outcomes[1]

    def calibration(self, outcomes: np.ndarray) -> dict[str, float]:
        return {"calibration_error": calibration_error(outcomes[2], self.right(outcomes))}

    def confusion(self, outcomes: np.ndarray, num_classes: int) -> np.ndarray:
        return confusion_matrix(*outcomes[:2].astype(np.int64), num_classes)

    def class_metrics(self, outcomes: np.ndarray, num_classes: int) -> ClassMetrics:
        return class_metrics(self.confusion(outcomes, num_classes))

    def total(self, outcomes: np.ndarray) -> float:
        return float(self.right(outcomes).mean())

    def mistakes(self, outcomes: np.ndarray, names: Sequence[str]) -> Iterator[Mistake]:
        for position in np.flatnonzero(~self.right(outcomes)).tolist():
            label, predicted, probability = outcomes[:, position].tolist()
            guess = names[int(predicted)]
            yield Mistake(probability, position, names[int(label)], guess, f"{probability:.1%} {guess}")

    def columns(self, most: int) -> list[str]:
        ranks = ("", *range(2, most + 1))
        return [f"{column}{rank}" for rank in ranks for column in ("class", "probability")]

    def cells(self, found: Sequence[tuple[str, float]]) -> list[str]:
        return list(chain.from_iterable((name, f"{probability:.6f}") for name, probability in found))


@dataclass(frozen=True)
class SeveralLabels(Labels):
    """Each image has any number of classes: a probability of each by sigmoid, which counts from a threshold on.

    Args:
        thresholds: one of each class, such as those that validation has chosen.
    """

    thresholds: list[float]

    score = "map"
    loss = "bce"
    activation = "sigmoid()"
    mistakes_by = "loss"
    mistakes_title = "mistakes of the highest loss"

    def probabilities(self, logits: Tensor) -> Tensor:
        return _at_least_single(logits).sigmoid()

    def mean_logits(self, logits: Tensor) -> Tensor:
        return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

    def classes(self, probabilities: Tensor, most: int) -> list[list[int]]:
        return _classes_above(probabilities, self.thresholds)

    def metrics(self, num_classes: int, training: bool, mixed: bool) -> dict[str, Metric]:
        """Create mean average precision 'map' and mean F1 'f1', see `MultiLabelScores`; none of training."""
        # The key is that of the metric, not of its values.
        return {} if training else {"scores": MultiLabelScores(self.thresholds)}

    def choose_thresholds(self, metrics: MetricCollection, choose: bool) -> None:
        metrics["scores"].thresholds = None if choose else self.thresholds

    def chosen(self, metrics: MetricCollection) -> SeveralLabels:
        classes = metrics["scores"].classes
        return self if classes is None else SeveralLabels(classes.threshold.tolist())

    def fitted(self, outcomes: np.ndarray) -> SeveralLabels:
        labels, probabilities = _columns(outcomes)
        return SeveralLabels(multi_label_metrics(probabilities, labels > 0).threshold.tolist())

    def restored(self, thresholds: list[float] | None) -> SeveralLabels:
        return self if thresholds is None else SeveralLabels(thresholds)

    def record(self) -> dict[str, Any]:
        return {"thresholds": self.thresholds}

    def outcomes(self, probabilities: Tensor, labels: Tensor) -> np.ndarray:
        """Return rows of labels, then of probabilities."""
        return torch.cat((labels.double(), probabilities.double()), 1).T.numpy()

    def class_metrics(self, outcomes: np.ndarray, num_classes: int) -> MultiLabelMetrics:
        labels, probabilities = _columns(outcomes)
        return multi_label_metrics(probabilities, labels > 0, self.thresholds)

    def total(self, outcomes: np.ndarray) -> float:
        return self.class_metrics(outcomes, len(self.thresholds)).means()["map"]

    def mistakes(self, outcomes: np.ndarray, names: Sequence[str]) -> Iterator[Mistake]:
        labels, probabilities = map(torch.from_numpy, _columns(outcomes))
        losses = F.binary_cross_entropy(probabilities, labels, reduction="none").mean(1).tolist()
        true, found = _classes_above(labels, [0.5] * len(names)), _classes_above(probabilities, self.thresholds)
        for position, (loss, label, predicted) in enumerate(zip(losses, true, found, strict=True)):
            if set(label) != set(predicted):
                texts = [";".join(names[index] for index in each) for each in (label, predicted)]
                yield Mistake(loss, position, *texts, f"predicted: {texts[1]}")

    def columns(self, most: int) -> list[str]:
        return ["label", "probability"]

    def cells(self, found: Sequence[tuple[str, float]]) -> list[str]:
        return [";".join(name for name, _ in found), ";".join(f"{probability:.6f}" for _, probability in found)]


def labels_of(multi_label: bool, num_classes: int) -> Labels:
    """Return the labels of a new classifier, by its arguments; all thresholds are 0.5."""
    return SeveralLabels([0.5] * num_classes) if multi_label else OneLabel()


def are_thresholds(value: Any, num_classes: int) -> bool:
    """Check a value from the description in a file: as many numbers in 0 ... 1 as there are classes."""
    return (
        isinstance(value, list)
        and len(value) == num_classes
        and all(isinstance(each, float | int) and not isinstance(each, bool) and 0 <= each <= 1 for each in value)
    )


def _at_least_single(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _columns(outcomes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels and probabilities (N, C) of outcomes with several labels."""
    labels, probabilities = np.split(outcomes, 2)
    return labels.T, probabilities.T


def _classes_above(probabilities: Tensor, thresholds: Sequence[float]) -> list[list[int]]:
    """List the classes of each image (B, C) that reach their thresholds, the most probable first."""
    # In double precision, on the CPU: a threshold may be midway between two floats next to each other.
    probabilities = probabilities.cpu().double()
    found = []
    for row in probabilities:
        above = (row >= torch.tensor(thresholds, dtype=torch.float64)).nonzero()[:, 0]
        found.append(above[row[above].argsort(descending=True, stable=True)].tolist())
    return found


def multi_label_metrics(
    probabilities: np.ndarray, labels: np.ndarray, thresholds: Sequence[float] | None = None
) -> MultiLabelMetrics:
    """Compute metrics of each class where images have several labels.

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

    def __init__(self, thresholds: Sequence[float] | None = None) -> None:
        super().__init__()
        self.thresholds: Sequence[float] | None = thresholds
        self.classes: MultiLabelMetrics | None = None
        for name in ("probabilities", "labels"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch, (B, C) both; an empty one, too, so that all processes have the same states to gather."""
        self.probabilities.append(logits.float().sigmoid())
        self.labels.append(labels.view(logits.shape).to(torch.uint8))

    def compute(self) -> dict[str, float]:
        """Return 'map' and 'f1'; NaN without images."""
        if not len(self.labels):
            return dict.fromkeys(("map", "f1"), np.nan)
        probabilities, labels = (dim_zero_cat(state).cpu().numpy() for state in (self.probabilities, self.labels))
        self.classes = multi_label_metrics(probabilities, labels.astype(bool), self.thresholds)
        return self.classes.means()
