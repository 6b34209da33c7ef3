"""What a test found out about every class, as files to look at."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from relvit.data.images.datasets import LabelledFiles
from relvit.evaluation.metrics import ClassMetrics, calibration_error, class_metrics, confusion_matrix
from relvit.plots import picture_of, plot_confusion, plot_sheet
from relvit.utils.messages import printable

# Images on the sheet.
SHOWN = 25
# Rows of mistakes.csv; classes beyond which the confusion matrix is mostly zeros and is written as pairs.
LISTED, DENSE = 10_000, 1000


class Mistake(NamedTuple):
    """One wrongly classified image: position among this process's images, probability of the predicted class, labels,
    and uint8 (height, width, 3) as the model saw it."""

    position: int
    probability: float
    label: int
    predicted: int
    picture: np.ndarray


class EvaluationReport(Callback):
    """Writes what a test found: each image once, on any number of devices.

    - `classes.csv`: images, precision, recall and F1 of each class; empty where undefined (see `class_metrics`);
    - `confusion.csv`, `confusion.png`: images of each class (rows) by predicted class (columns); with more than 1,000
      classes the CSV holds a row for each pair that occurs;
    - `mistakes.csv`: path, true class, predicted class and its probability, the most confident first, at most 10,000;
    - `mistakes.png`: the first 25 of them, as the model saw them.

    Args:
        folder: where to write.

    Attributes:
        results: after the test, on the main process: 'images', the logged metrics, 'test/f1' (mean over the classes
            that have images) and 'test/calibration_error'; empty where there were no images.
        classes: likewise, metrics of each class.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, float] = {}
        self.classes: ClassMetrics | None = None
        self._hook: Any = None

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._outcomes: list[np.ndarray] = []
        self._mistakes: list[Mistake] = []
        self._count = 0
        self._hook = pl_module.register_forward_hook(self._keep)

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        images, labels = batch
        if not len(labels):
            return
        probability, predicted = self._logits.float().softmax(-1).max(-1)
        # Doubles, which hold labels exactly, only on the CPU: not every accelerator has them.
        columns = [column.cpu().double() for column in (labels, predicted, probability)]
        self._outcomes.append(torch.stack(columns).numpy())
        wrong = probability.where(predicted != labels, -1)
        for place in wrong.topk(min(SHOWN, len(labels))).indices[: int((wrong >= 0).sum())].tolist():
            numbers = (probability[place].item(), labels[place].item(), predicted[place].item())
            if len(self._mistakes) < SHOWN or numbers[0] > self._mistakes[-1].probability:
                picture = picture_of(images[place], trainer.datamodule.mean, trainer.datamodule.std)
                self._mistakes.append(Mistake(self._count + place, *numbers, picture))
                self._mistakes = _first(self._mistakes)
        self._count += len(labels)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hook.remove()
        names = _names(trainer)
        outcomes = np.concatenate([np.empty((3, 0)), *self._outcomes], axis=1)
        wrong = [(names[i], *outcomes[:, i]) for i in np.flatnonzero(outcomes[0] != outcomes[1])]
        parts = [(outcomes, wrong, [(names[mistake.position], mistake) for mistake in self._mistakes])]
        if trainer.world_size > 1:
            own, parts = parts[0], [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, own)
        if not trainer.is_global_zero:
            return
        outcomes = np.concatenate([part[0] for part in parts], axis=1)
        if not outcomes.shape[1]:
            return
        self.results = {"images": outcomes.shape[1]}
        self.results |= {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._write_classes(outcomes, trainer.datamodule.class_names)
        self._write_mistakes([row for part in parts for row in part[1]], trainer.datamodule.class_names)
        self._draw_mistakes([shown for part in parts for shown in part[2]], trainer.datamodule.class_names)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _keep(self, module: nn.Module, args: Any, logits: Tensor) -> None:
        self._logits = logits

    def _write_classes(self, outcomes: np.ndarray, names: Sequence[str]) -> None:
        labels, predicted = outcomes[:2].astype(np.int64)
        confusion = confusion_matrix(labels, predicted, len(names))
        self.classes = metrics = class_metrics(confusion)
        self.results["test/f1"] = float(metrics.f1[metrics.count > 0].mean())
        self.results["test/calibration_error"] = calibration_error(outcomes[2], labels == predicted)
        values = [["" if np.isnan(value) else f"{value:.4f}" for value in column] for column in metrics[1:]]
        rows = zip(names, metrics.count.tolist(), *values, strict=True)
        _write(self.folder / "classes.csv", ["class", *ClassMetrics._fields], rows)
        if len(names) <= DENSE:
            rows = ([name, *row] for name, row in zip(names, confusion.tolist(), strict=True))
            _write(self.folder / "confusion.csv", ["true", *names], rows)
        else:
            rows = ([names[i], names[j], confusion[i, j]] for i, j in np.argwhere(confusion))
            _write(self.folder / "confusion.csv", ["true", "predicted", "count"], rows)
        plot_confusion(confusion, names, self.folder / "confusion.png")

    def _write_mistakes(self, wrong: list[tuple[Any, ...]], names: Sequence[str]) -> None:
        wrong.sort(key=lambda row: (-row[3], row[0]))
        rows = [
            [path, names[int(label)], names[int(predicted)], f"{probability:.6f}"]
            for path, label, predicted, probability in wrong[:LISTED]
        ]
        _write(self.folder / "mistakes.csv", ["path", "true", "predicted", "probability"], rows)

    def _draw_mistakes(self, shown: list[tuple[str, Mistake]], names: Sequence[str]) -> None:
        shown = sorted(shown, key=lambda pair: (-pair[1].probability, pair[0]))[:SHOWN]
        if shown:
            captions = [
                f"{Path(name).name}\ntrue: {names[mistake.label]}\n{mistake.probability:.1%} {names[mistake.predicted]}"
                for name, mistake in shown
            ]
            pictures = [mistake.picture for _, mistake in shown]
            plot_sheet(pictures, captions, self.folder / "mistakes.png", title="most confident mistakes")


def _first(mistakes: list[Mistake]) -> list[Mistake]:
    return sorted(mistakes, key=lambda mistake: -mistake.probability)[:SHOWN]


def _names(trainer: Trainer) -> list[str]:
    """A name for each evaluated image that this process had, in the order in which they came."""
    data = trainer.datamodule
    split = data.evaluated_split
    dataset = data.dataset(split)
    # As ImageData deals them out.
    indices = range(trainer.global_rank, len(dataset), trainer.world_size)
    if not isinstance(dataset, LabelledFiles):
        return [f"{split}/{index:05d}" for index in indices]
    unreadable = data.unreadable.get(split, {})
    paths = (str(dataset.samples[index][0]) for index in indices)
    return [printable(path) for path in paths if path not in unreadable]


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
