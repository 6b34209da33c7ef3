"""Callback that writes the files of a test: tables of classes and mistakes, the figure of the confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch.distributed
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from relvit.app.data import ImageData, UnreadableImageError
from relvit.app.data.batches import image_of
from relvit.app.data.images.file_datasets import LabelledFiles
from relvit.app.evaluation.trust.robustness import Corruptions, evaluate_corruptions
from relvit.app.plots import picture_of, plot_confusion, plot_sheet
from relvit.app.training.class_metrics import AnyClassMetrics
from relvit.app.training.labels import Labels
from relvit.app.utils.files import from_here, write_csv
from relvit.app.utils.shown_text import printable

# mistakes.png shows at most `SHOWN` mistakes, and mistakes.csv lists at most `LISTED`.
SHOWN, LISTED = 25, 10_000
# With more than this number of classes, the confusion matrix is mostly zeros, so only the entries that are not zero are
# written, a pair of classes per row.
DENSE = 1000


class EvaluationReport(Callback):
    """Write the results of a test: each image once, on any number of devices.

    - `classes.csv`: number of images, precision, recall and F1 of each class (see `class_metrics`); with several labels
      per image also average precision and threshold (see `multi_label_metrics`). A cell is empty if a metric is
      undefined;
    - `confusion.csv`, `confusion.png`: numbers of images by true class (rows) and predicted class (columns); with more
      than 1,000 classes the CSV has a row for each pair of classes that occurs. With several labels per image these
      files are not written;
    - `mistakes.csv`: path as in `predictions.csv`, true class, predicted class and its probability, the most confident
      first, at most 10,000; with several labels per image: all true and all predicted classes (joined by ';') and the
      binary cross-entropy of each image with a wrong or missing class, the highest first;
    - `mistakes.png`: the first 25 of these mistakes, with the images as the model saw them;
    - `corruptions.csv`, only for a robustness set with corruptions: accuracy of each corruption, by severity, and the
      mean over severities.

    Args:
        folder: where to write.

    Attributes:
        results: after the test, on the main process: 'images', the logged metrics, 'test/f1' (mean over the classes
            that have images) and, with one label per image, 'test/calibration_error'; empty if there were no images.
        classes: metrics of each class, after the test, on the main process.
        corruptions: accuracies of corruptions, after the test, on the main process; None for data without corruptions.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, float] = {}
        self.classes: AnyClassMetrics | None = None
        self.corruptions: Corruptions | None = None

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._labels: Labels = pl_module.labels
        self._kept: list[np.ndarray] = []

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        labels = batch[1]
        if len(labels):
            # `keep` puts probabilities and labels into one array of float64, which holds labels exactly. Move both to
            # the CPU first, since some accelerators lack float64.
            self._kept.append(self._labels.keep(self._labels.probabilities(outputs).cpu(), labels.cpu()))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule
        parts = [(self._kept, _evaluated_indices(data, trainer.global_rank, trainer.world_size))]
        if trainer.world_size > 1:
            own, parts = parts[0], [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, own)
        batches = [batch for part, _ in parts for batch in part]
        if not trainer.is_global_zero or not batches:
            return
        kept = np.concatenate(batches, axis=1)
        # A limit of batches may have ended the test early, so keep only the indices of images that were evaluated: the
        # first ones of each process.
        counts = [sum(batch.shape[1] for batch in part) for part, _ in parts]
        indices = [index for (_, all_of_it), count in zip(parts, counts, strict=True) for index in all_of_it[:count]]
        self.results = {"images": kept.shape[1]}
        self.results |= {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._write_classes(kept, data.class_names)
        self._write_mistakes(kept, indices, data)
        if conditions := getattr(data, "conditions", ()):
            of_images = [conditions[index] for index in indices]
            present = len(set(data.dataset("test").targets))
            self.corruptions = evaluate_corruptions(self._labels.right(kept), of_images, present)
            self.results |= self.corruptions.results
            write_csv(self.folder / "corruptions.csv", *self.corruptions.table())

    def _write_classes(self, kept: np.ndarray, names: Sequence[str]) -> None:
        self.classes = metrics = self._labels.class_metrics(kept, len(names))
        # With several labels, the logged metrics already have the mean F1, so do not compute it again: if no image has
        # a label, NumPy would warn of the mean of an empty array.
        if "test/f1" not in self.results:
            self.results["test/f1"] = float(metrics.f1[metrics.count > 0].mean())
        self.results |= {f"test/{name}": value for name, value in self._labels.calibration(kept).items()}
        values = [["" if np.isnan(value) else f"{value:.4f}" for value in column] for column in metrics[1:]]
        rows = zip(names, metrics.count.tolist(), *values, strict=True)
        write_csv(self.folder / "classes.csv", ["class", *metrics._fields], rows)
        if (confusion := self._labels.confusion(kept, len(names))) is None:
            return
        if len(names) <= DENSE:
            rows = ([name, *row] for name, row in zip(names, confusion.tolist(), strict=True))
            write_csv(self.folder / "confusion.csv", ["true", *names], rows)
        else:
            rows = ([names[i], names[j], confusion[i, j]] for i, j in np.argwhere(confusion))
            write_csv(self.folder / "confusion.csv", ["true", "predicted", "count"], rows)
        plot_confusion(confusion, names, self.folder / "confusion.png")

    def _write_mistakes(self, kept: np.ndarray, indices: Sequence[int], data: ImageData) -> None:
        dataset = data.dataset(data.evaluated_split)
        wrong = []
        for mistake in self._labels.mistakes(kept, data.class_names):
            index = indices[mistake.position]
            path = f"{data.evaluated_split}/{index:05d}"
            if isinstance(dataset, LabelledFiles):
                source = dataset.samples[index][0]
                path = printable(from_here(source) if isinstance(source, str) else str(source))
            wrong.append((-mistake.weight, path, mistake.true, mistake.predicted, index, mistake.caption))
        wrong.sort()
        rows = ([path, true, predicted, f"{-weight:.6f}"] for weight, path, true, predicted, *_ in wrong[:LISTED])
        write_csv(self.folder / "mistakes.csv", ["path", "true", "predicted", self._labels.mistakes_by], rows)
        pictures, captions = [], []
        for _, path, true, _, index, caption in wrong[:SHOWN]:
            # If an image file was deleted after the model saw it, leave its picture out instead of losing all results
            # of the test.
            with suppress(UnreadableImageError):
                pictures.append(picture_of(image_of(dataset[index][0]), data.mean, data.std))
                captions.append(f"{Path(path).name}\ntrue: {true}\n{caption}")
        if pictures:
            plot_sheet(pictures, captions, self.folder / "mistakes.png", title=self._labels.mistakes_title)


def _evaluated_indices(data: ImageData, rank: int, world_size: int) -> list[int]:
    """List the images that this process evaluated, by index and in order, as `ImageData` divides them."""
    dataset = data.dataset(data.evaluated_split)
    indices = range(rank, len(dataset), world_size)
    unreadable = data.unreadable.get(data.evaluated_split, {})
    if not unreadable or not isinstance(dataset, LabelledFiles):
        return list(indices)
    return [index for index in indices if str(dataset.samples[index][0]) not in unreadable]
