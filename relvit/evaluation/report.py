"""Callbacks that write a test's tables and figures: classes, confusion matrix, mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from relvit.data import ImageData, UnreadableImageError
from relvit.data.batches import image_of
from relvit.data.images.datasets import LabelledFiles
from relvit.evaluation.metrics import ClassMetrics, calibration_error, class_metrics, confusion_matrix
from relvit.evaluation.trust.robustness import Corruptions, evaluate_corruptions
from relvit.plots import picture_of, plot_confusion, plot_sheet
from relvit.training.multi_label import MultiLabelMetrics, classes_above, multi_label_metrics
from relvit.utils.files import from_here, write_csv
from relvit.utils.messages import printable

# The sheet shows so many mistakes, and mistakes.csv lists so many.
SHOWN, LISTED = 25, 10_000
# The confusion matrix of more classes is mostly zeros, and is written as pairs.
DENSE = 1000


class EvaluationReport(Callback):
    """Write the results of a test: each image once, on any number of devices.

    - `classes.csv`: images, precision, recall and F1 of each class; empty where undefined (see `class_metrics`);
    - `confusion.csv`, `confusion.png`: images of each class (rows) by predicted class (columns); with more than 1,000
      classes the CSV holds a row for each pair that occurs;
    - `mistakes.csv`: path as in `predictions.csv`, true class, predicted class and its probability, the most confident
      first, at most 10,000;
    - `mistakes.png`: the first 25 of them, as the model saw them;
    - `corruptions.csv` of a robustness set with corruptions: accuracy of each, by severity and their mean.

    Args:
        folder: where to write.

    Attributes:
        results: after the test, on the main process: 'images', the logged metrics, 'test/f1' (mean over the classes
            that have images) and 'test/calibration_error'; empty where there were no images.
        classes: likewise, metrics of each class.
        corruptions: likewise, accuracies of corruptions; None of other data.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, float] = {}
        self.classes: ClassMetrics | MultiLabelMetrics | None = None
        self.corruptions: Corruptions | None = None
        self._hook: Any = None

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Rows: label, predicted class, its probability; of a multi-label classifier labels, then probabilities.
        self._thresholds = pl_module.thresholds
        rows = 3 if self._thresholds is None else 2 * len(self._thresholds)
        self._outcomes: list[np.ndarray] = [np.empty((rows, 0))]
        self._hook = pl_module.register_forward_hook(self._keep_logits)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        labels = batch[1]
        if len(labels):
            # Doubles, which hold labels exactly, only on the CPU: not every accelerator has them.
            self._outcomes.append(
                self._rows(pl_module.probabilities(self._logits).cpu().double(), labels.cpu()).numpy()
            )

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hook.remove()
        data = trainer.datamodule
        outcomes = np.concatenate(self._outcomes, axis=1)
        indices = _evaluated_indices(data, trainer.global_rank, trainer.world_size)
        parts = [np.vstack((outcomes, indices[: outcomes.shape[1]]))]
        if trainer.world_size > 1:
            own, parts = parts[0], [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, own)
        outcomes = np.concatenate(parts, axis=1)
        if not trainer.is_global_zero or not outcomes.shape[1]:
            return
        self.results = {"images": outcomes.shape[1]}
        self.results |= {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._write_classes(outcomes, data.class_names)
        self._write_mistakes(outcomes, data)
        if conditions := getattr(data, "conditions", ()):
            of_images = [conditions[int(index)] for index in outcomes[3]]
            present = len(set(data.dataset("test").targets))
            self.corruptions = evaluate_corruptions(outcomes[0] == outcomes[1], of_images, present)
            self.results |= self.corruptions.results
            write_csv(self.folder / "corruptions.csv", *self.corruptions.table())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _keep_logits(self, module: nn.Module, args: Any, logits: Tensor) -> None:
        self._logits = logits

    def _rows(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        probability, predicted = probabilities.max(-1)
        return torch.stack((labels.double(), predicted.double(), probability))

    def _write_metrics(self, metrics: ClassMetrics | MultiLabelMetrics, names: Sequence[str]) -> None:
        self.classes = metrics
        values = [["" if np.isnan(value) else f"{value:.4f}" for value in column] for column in metrics[1:]]
        rows = zip(names, metrics.count.tolist(), *values, strict=True)
        write_csv(self.folder / "classes.csv", ["class", *metrics._fields], rows)

    def _write_classes(self, outcomes: np.ndarray, names: Sequence[str]) -> None:
        labels, predicted = outcomes[:2].astype(np.int64)
        confusion = confusion_matrix(labels, predicted, len(names))
        metrics = class_metrics(confusion)
        self.results["test/f1"] = float(metrics.f1[metrics.count > 0].mean())
        self.results["test/calibration_error"] = calibration_error(outcomes[2], labels == predicted)
        self._write_metrics(metrics, names)
        if len(names) <= DENSE:
            rows = ([name, *row] for name, row in zip(names, confusion.tolist(), strict=True))
            write_csv(self.folder / "confusion.csv", ["true", *names], rows)
        else:
            rows = ([names[i], names[j], confusion[i, j]] for i, j in np.argwhere(confusion))
            write_csv(self.folder / "confusion.csv", ["true", "predicted", "count"], rows)
        plot_confusion(confusion, names, self.folder / "confusion.png")

    # What mistakes are sorted by, a column, and the title of their sheet.
    order: str = "probability"
    title: str = "most confident mistakes"

    def _mistakes(self, outcomes: np.ndarray, names: Sequence[str]) -> Iterator[tuple[float, int, str, str, str]]:
        """Yield what a mistake is sorted by, the index of its image, true and predicted classes, and its caption."""
        for label, predicted, probability, index in outcomes[:, outcomes[0] != outcomes[1]].T.tolist():
            guess = names[int(predicted)]
            yield probability, int(index), names[int(label)], guess, f"{probability:.1%} {guess}"

    def _write_mistakes(self, outcomes: np.ndarray, data: ImageData) -> None:
        dataset = data.dataset(data.evaluated_split)
        wrong = []
        for sure, index, true, predicted, caption in self._mistakes(outcomes, data.class_names):
            path = f"{data.evaluated_split}/{index:05d}"
            if isinstance(dataset, LabelledFiles):
                source = dataset.samples[index][0]
                path = printable(from_here(source) if isinstance(source, str) else str(source))
            wrong.append((-sure, path, true, predicted, index, caption))
        wrong.sort()
        rows = ([path, true, predicted, f"{-sure:.6f}"] for sure, path, true, predicted, *_ in wrong[:LISTED])
        write_csv(self.folder / "mistakes.csv", ["path", "true", "predicted", self.order], rows)
        pictures, captions = [], []
        for _, path, true, _, index, caption in wrong[:SHOWN]:
            # The test keeps its other results where a file has been deleted since.
            with suppress(UnreadableImageError):
                pictures.append(picture_of(image_of(dataset[index][0]), data.mean, data.std))
                captions.append(f"{Path(path).name}\ntrue: {true}\n{caption}")
        if pictures:
            plot_sheet(pictures, captions, self.folder / "mistakes.png", title=self.title)


class MultiLabelReport(EvaluationReport):
    """Write the results of a test of a multi-label classifier, with its thresholds: each image once.

    - `classes.csv`: images, precision, recall, F1, average precision and threshold of each class, see
      `MultiLabelMetrics`;
    - `mistakes.csv`: path as in `predictions.csv`, true classes, predicted classes (with ';' between) and binary
      cross-entropy of each image with a wrong or missing class, the highest first, at most 10,000;
    - `mistakes.png`: the first 25 of them, as the model saw them.

    Attributes:
        results: after the test, on the main process: 'images' and the logged metrics; empty where there were no images.
        classes: likewise, metrics of each class.
    """

    order: str = "loss"
    title: str = "mistakes of the highest loss"

    def _rows(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        return torch.cat((labels.double(), probabilities), 1).T

    def _write_classes(self, outcomes: np.ndarray, names: Sequence[str]) -> None:
        labels, probabilities = (rows.T for rows in np.split(outcomes[:-1], 2))
        self._write_metrics(multi_label_metrics(probabilities, labels > 0, self._thresholds), names)

    def _mistakes(self, outcomes: np.ndarray, names: Sequence[str]) -> Iterator[tuple[float, int, str, str, str]]:
        labels, probabilities = (torch.from_numpy(rows.T) for rows in np.split(outcomes[:-1], 2))
        losses = F.binary_cross_entropy(probabilities, labels, reduction="none").mean(1).tolist()
        true, found = (classes_above(labels, [0.5] * len(names)), classes_above(probabilities, self._thresholds))
        for index, loss, label, predicted in zip(outcomes[-1].tolist(), losses, true, found, strict=True):
            if set(label) != set(predicted):
                texts = [";".join(names[position] for position in each) for each in (label, predicted)]
                yield loss, int(index), *texts, f"predicted: {texts[1]}"


def _evaluated_indices(data: ImageData, rank: int, world_size: int) -> list[int]:
    """Indices of the images that this process evaluated, in order, as `ImageData` divides a test among processes."""
    dataset = data.dataset(data.evaluated_split)
    indices = range(rank, len(dataset), world_size)
    unreadable = data.unreadable.get(data.evaluated_split, {})
    if not unreadable or not isinstance(dataset, LabelledFiles):
        return list(indices)
    return [index for index in indices if str(dataset.samples[index][0]) not in unreadable]
