"""One label per image, or several (multi-label): probabilities, means over views, predictions, mistakes, thresholds.

`class_metrics.py` computes the metrics of each class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from relvit.app.training.class_metrics import (
    AnyClassMetrics,
    ClassMetrics,
    MultiLabelMetrics,
    MultiLabelScores,
    calibration_error,
    class_metrics,
    confusion_matrix,
    multi_label_metrics,
)

if TYPE_CHECKING:
    from relvit.app.data import ImageData

# A prediction for an image of one label names at most this number of classes, unless the user gives another number.
TOP = 5

NOT_FINITE = (
    "the model computes probabilities that are not a number: check its weights and temperature, and mean and std of "
    "the images, or compute in a higher precision"
)

# Labels of one class for each image may have any of these types.
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Mistake(NamedTuple):
    """A wrong prediction.

    Attributes:
        weight: The probability of the wrong class, or the loss of a multi-label image: larger is worse.
        position: The index of the image's column in the array of results, see `Labels.keep`.
        true: The names of the image's classes.
        predicted: The names of the predicted classes.
        caption: The text under the image in the figure of mistakes.
    """

    weight: float
    position: int
    true: str
    predicted: str
    caption: str


class Labels(Protocol):
    """The number of labels of an image, one or several, and everything that depends on it.

    Attributes:
        score: The metric that chooses the best checkpoint.
        loss: The loss of evaluation, by its name in `ClassificationLoss`: 'ce' or 'bce'.
        activation: Python code that turns logits into probabilities, such as 'softmax(-1)', to print for users.
        problem_type: The kind of labels, as the configurations of transformers name it.
        commands: The names of the commands of relvit that use a checkpoint after its training, to print for users.
        mistakes_by: The name of the column by which a table of mistakes is sorted.
        mistakes_title: The title of the pictures of mistakes.
        thresholds: For each class, the lowest probability at which an image has the class. None: an image has its most
            probable class.
    """

    score: str
    loss: str
    activation: str
    problem_type: str
    commands: str
    mistakes_by: str
    mistakes_title: str
    thresholds: list[float] | None

    def probabilities(self, logits: Tensor) -> Tensor:
        """Compute the probabilities (B, classes) of logits: float64 if the logits are float64, otherwise float32.

        Raises:
            ValueError: A probability is not finite.
        """

    def mean_logits(self, logits: Tensor) -> Tensor:
        """Compute the logits (B, classes) of the mean of two probabilities from the logits (2, B, classes) of both."""

    def classes(self, probabilities: Tensor, most: int) -> list[list[int]]:
        """List the predicted classes of images (B, classes), most probable first; without thresholds `most` of them."""

    def predicted(
        self, probabilities: Tensor, names: Sequence[str], top: int | None = None
    ) -> list[list[tuple[str, float]]]:
        """List names and probabilities of the `top` classes of images (B, classes), or of the classes in `classes`."""
        most = min(top or TOP, len(names))
        chosen = most_probable(probabilities, most) if top else self.classes(probabilities, most)
        rows = zip(probabilities, chosen, strict=True)
        found = ((indices, row[indices].tolist()) for row, indices in rows)
        return [[(names[index], value) for index, value in zip(*row, strict=True)] for row in found]

    def checked(self, labels: Tensor, num_classes: int, training: bool) -> Tensor:
        """Return the labels of a batch; in a training they may be soft targets, floating point (B, num_classes).

        Raises:
            ValueError: The labels have another shape or type, or are soft in an evaluation.
        """

    def metrics(self, num_classes: int, training: bool, mixed: bool) -> dict[str, Metric]:
        """Create the metrics of an epoch, except for its loss; the images of a training may be mixed."""

    def choose_thresholds(self, metrics: MetricCollection, choose: bool) -> None:
        """Let metrics choose thresholds on the images that they see, or let them use the present thresholds."""

    def chosen(self, metrics: MetricCollection) -> Labels:
        """Return these labels with the thresholds that the metrics have chosen."""
        return self

    def restored(self, thresholds: list[float] | None) -> Labels:
        """Return these labels with the thresholds of a checkpoint, if it has some."""
        return self

    def record(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's description (`checkpoints/description.py`) that belong to the labels."""
        return {}

    def columns(self, most: int) -> list[str]:
        """Name the columns of a table of predictions, which `cells` fills."""

    def cells(self, found: Sequence[tuple[str, float]]) -> list[str]:
        """Format names and probabilities of the classes of an image as the cells of a row."""

    # `keep` returns the results of a batch of a test as an array, float64 (rows, images), with a column for each image.
    # The report of the test joins the arrays of all batches and processes. All methods below `keep` compute results
    # from the joined array, `kept`.

    def keep(self, probabilities: Tensor, labels: Tensor) -> np.ndarray:
        """Return the rows of a batch: probabilities (B, classes) and labels (B,) or (B, classes) on the CPU."""

    def right(self, kept: np.ndarray) -> np.ndarray | None:
        """Return whether each image was right, bool (N,); None with several labels."""

    def calibration(self, kept: np.ndarray) -> dict[str, float]:
        """Return the 'calibration_error'; nothing with several labels."""
        return {}

    def confusion(self, kept: np.ndarray, num_classes: int) -> np.ndarray | None:
        """Compute the confusion matrix; None with several labels."""

    def class_metrics(self, kept: np.ndarray, num_classes: int) -> AnyClassMetrics:
        """Compute the metrics of each class."""

    def compute_score(self, kept: np.ndarray) -> float:
        """Compute the metric that `score` names: accuracy or mean average precision."""

    def mistakes(self, kept: np.ndarray, names: Sequence[str]) -> Iterator[Mistake]:
        """Yield the mistakes, given the names of the classes."""


@dataclass(frozen=True)
class OneLabel(Labels):
    """Images of one class each: a softmax gives the probabilities, and the most probable class is predicted."""

    score = "acc1"
    loss = "ce"
    activation = "softmax(-1)"
    problem_type = "single_label_classification"
    commands = "show, calibrate, probe, embed, export, publish"
    mistakes_by = "probability"
    mistakes_title = "most confident mistakes"
    thresholds: list[float] | None = field(default=None, init=False)

    def probabilities(self, logits: Tensor) -> Tensor:
        return _finite(_at_least_single(logits).softmax(-1))

    def mean_logits(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1).logsumexp(0) - math.log(2)

    def classes(self, probabilities: Tensor, most: int) -> list[list[int]]:
        return most_probable(probabilities, most)

    def checked(self, labels: Tensor, num_classes: int, training: bool) -> Tensor:
        if labels.ndim == 1 and labels.dtype in _WHOLE:
            # On a GPU the comparison would wait for the device in every step, so leave it to PyTorch's own checks.
            if labels.device.type == "cpu" and len(labels):
                low, high = (int(value) for value in labels.aminmax())
                if low < 0 or high >= num_classes:
                    raise ValueError(
                        f"labels must be from 0 to {num_classes - 1}, as there are {num_classes} classes, got labels "
                        f"from {low} to {high}"
                    )
            return labels.long()
        if training and labels.is_floating_point() and labels.shape[1:] == (num_classes,):
            return labels
        soft = f", or soft targets, floating point (B, {num_classes})" if training else ""
        raise ValueError(f"labels must be the class of each image, whole numbers (B,){soft}; {_got(labels)}")

    def metrics(self, num_classes: int, training: bool, mixed: bool) -> dict[str, Metric]:
        """Create top-1 accuracy 'acc1' and, with five classes or more, top-5 accuracy 'acc5'.

        If mixup or CutMix mixes images, the class with the larger part of a mixed image counts as its label, and the
        metrics are named 'acc1_mixed' and 'acc5_mixed'.
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

    def keep(self, probabilities: Tensor, labels: Tensor) -> np.ndarray:
        """Return rows of label, predicted class and probability of this class."""
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

    def compute_score(self, kept: np.ndarray) -> float:
        return float(self.right(kept).mean())

    def mistakes(self, kept: np.ndarray, names: Sequence[str]) -> Iterator[Mistake]:
        for position in np.flatnonzero(~self.right(kept)).tolist():
            label, predicted, probability = kept[:, position].tolist()
            guess = names[int(predicted)]
            yield Mistake(probability, position, names[int(label)], guess, f"{probability:.1%} {guess}")


@dataclass(frozen=True)
class SeveralLabels(Labels):
    """Images of any number of classes: a sigmoid gives each class a probability, and a threshold decides.

    Args:
        thresholds: One threshold for each class. Each validation of a training chooses the thresholds by
            `multi_label_metrics` (see `EpochMetrics.on_validation_epoch_end`), and checkpoints hold the thresholds in
            their description (see `record`).
    """

    thresholds: list[float]

    score = "map"
    loss = "bce"
    activation = "sigmoid()"
    problem_type = "multi_label_classification"
    commands = "show, calibrate, embed, export, publish"
    mistakes_by = "loss"
    mistakes_title = "mistakes of the highest loss"

    def probabilities(self, logits: Tensor) -> Tensor:
        return _finite(_at_least_single(logits).sigmoid())

    def mean_logits(self, logits: Tensor) -> Tensor:
        return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

    def classes(self, probabilities: Tensor, most: int) -> list[list[int]]:
        return classes_above(probabilities, self.thresholds)

    def checked(self, labels: Tensor, num_classes: int, training: bool) -> Tensor:
        fits, values = labels.shape[1:] == (num_classes,), ""
        # In a training on a GPU the comparison would wait for the device in every step, so leave it out.
        if fits and labels.dtype != torch.bool and not (training and labels.device.type != "cpu"):
            allowed = (labels == 0) | (labels == 1)
            if training and labels.is_floating_point():
                allowed = (labels >= 0) & (labels <= 1)
            fits, values = bool(allowed.all()), f" with values from {labels.min():g} to {labels.max():g}"
        if fits:
            # Whole numbers become bool, since label smoothing and mixup take floating point numbers for soft targets.
            return labels if labels.is_floating_point() else labels.bool()
        soft = ", or soft targets between them" if training else ""
        raise ValueError(f"labels must be 0 or 1 for each class, (B, {num_classes}){soft}; {_got(labels)}{values}")

    def metrics(self, num_classes: int, training: bool, mixed: bool) -> dict[str, Metric]:
        """Create mean average precision 'map' and mean F1 'f1', see `MultiLabelScores`; a training has neither."""
        return {} if training else {"scores": MultiLabelScores(self.thresholds)}

    def choose_thresholds(self, metrics: MetricCollection, choose: bool) -> None:
        metrics["scores"].thresholds = None if choose else self.thresholds

    def chosen(self, metrics: MetricCollection) -> SeveralLabels:
        classes = metrics["scores"].classes
        return self if classes is None else SeveralLabels(classes.threshold.tolist())

    def fitted(self, kept: np.ndarray) -> SeveralLabels:
        """Return labels with the thresholds of the best F1 on the images that were kept.

        A class without images keeps its threshold.
        """
        labels, probabilities = np.split(kept, 2)
        found = multi_label_metrics(probabilities.T, labels.T > 0)
        return SeveralLabels(np.where(found.count > 0, found.threshold, self.thresholds).tolist())

    def restored(self, thresholds: list[float] | None) -> SeveralLabels:
        return self if thresholds is None else SeveralLabels(thresholds)

    def record(self) -> dict[str, Any]:
        return {"thresholds": self.thresholds}

    def columns(self, most: int) -> list[str]:
        return ["label", "probability"]

    def cells(self, found: Sequence[tuple[str, float]]) -> list[str]:
        return [";".join(name for name, _ in found), ";".join(f"{probability:.6f}" for _, probability in found)]

    def keep(self, probabilities: Tensor, labels: Tensor) -> np.ndarray:
        """Return C rows of labels, then C rows of probabilities."""
        return torch.cat((labels.double(), probabilities.double()), 1).T.numpy()

    def class_metrics(self, kept: np.ndarray, num_classes: int) -> MultiLabelMetrics:
        labels, probabilities = np.split(kept, 2)
        return multi_label_metrics(probabilities.T, labels.T > 0, self.thresholds)

    def compute_score(self, kept: np.ndarray) -> float:
        return self.class_metrics(kept, len(self.thresholds)).means()["map"]

    def mistakes(self, kept: np.ndarray, names: Sequence[str]) -> Iterator[Mistake]:
        labels, probabilities = (torch.from_numpy(rows.T) for rows in np.split(kept, 2))
        losses = F.binary_cross_entropy(probabilities, labels, reduction="none").mean(1).tolist()
        true, found = classes_above(labels, [0.5] * len(names)), classes_above(probabilities, self.thresholds)
        for position, (loss, label, predicted) in enumerate(zip(losses, true, found, strict=True)):
            if set(label) != set(predicted):
                texts = [";".join(names[index] for index in each) for each in (label, predicted)]
                yield Mistake(loss, position, *texts, f"predicted: {texts[1]}")


def labels_of(thresholds: list[float] | None) -> Labels:
    """Return `SeveralLabels` with these thresholds, or `OneLabel` if there are none."""
    return OneLabel() if thresholds is None else SeveralLabels(thresholds)


def labels_in(data: ImageData) -> Labels:
    """Return `SeveralLabels` for data whose images have several labels, without thresholds, or else `OneLabel`."""
    return labels_of([] if data.multi_label else None)


def are_thresholds(value: Any, num_classes: int) -> bool:
    """Return whether a value that was read from a file is a list of numbers in 0 ... 1, one for each class."""
    return (
        isinstance(value, list)
        and len(value) == num_classes
        and all(isinstance(each, float | int) and not isinstance(each, bool) and 0 <= each <= 1 for each in value)
    )


def _got(labels: Tensor) -> str:
    return f"got {str(labels.dtype).removeprefix('torch.')} of shape {tuple(labels.shape)}"


def _at_least_single(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _finite(probabilities: Tensor) -> Tensor:
    if not probabilities.isfinite().all():
        raise ValueError(NOT_FINITE)
    return probabilities


def most_probable(probabilities: Tensor, most: int) -> list[list[int]]:
    """List the `most` classes of the highest probability of each image (B, classes), in order."""
    # Two-byte logits of different classes are often equal. A stable sort then puts the first class first, as the
    # accuracy and the confusion matrix of a test do, but `topk` may put any of the classes first.
    return probabilities.sort(descending=True, stable=True).indices[:, :most].tolist()


def classes_above(probabilities: Tensor, thresholds: Sequence[float]) -> list[list[int]]:
    """List the classes of each image (B, classes) that reach their thresholds, the most probable first."""
    # Compare in float64, because a threshold may lie between two neighbouring float32 numbers; and on the CPU, because
    # some accelerators lack float64.
    probabilities, lowest = probabilities.cpu().double(), torch.tensor(thresholds, dtype=torch.float64)
    found = []
    for row in probabilities:
        above = (row >= lowest).nonzero()[:, 0]
        found.append(above[row[above].argsort(descending=True, stable=True)].tolist())
    return found
