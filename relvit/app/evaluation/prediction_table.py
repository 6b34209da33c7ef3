"""Write `predictions.csv`, a table of predicted classes with a row per image (`relvit predict`)."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from relvit.app.data.batches import ImageBatch, images_of
from relvit.app.data.images.file_datasets import NamedFiles
from relvit.app.data.loading.eval_shards import rank_of
from relvit.app.plots import picture_of, plot_steps
from relvit.app.training.labels import TOP, Labels
from relvit.app.utils.files import atomic_write
from relvit.app.utils.shown_text import printable

# `relvit predict` prints at most this number of rows.
LISTED = 10


class PredictionTable(BasePredictionWriter):
    """Write `predictions.csv`, with a row per image in the order of the data.

    The columns are path, then class and probability of the most probable class, then class2, probability2 and so on, up
    to the fifth most probable class. Paths are relative if they are below the current folder, otherwise absolute.

    For a multi-label classifier the columns are path, label and probability. A cell of the column label has all classes
    that reach their thresholds, joined by ';', the most probable first; the next cell has their probabilities, in the
    same order. `ImageListData` reads such a table as a list.

    On several devices each process writes its rows into a separate file beside the table, and the main process merges
    these files at the end, so all machines have to see the folder. The table appears complete or not at all.

    `step_maps` is for models that compute each patch for a number of steps of its own (adaptive halting,
    `relvit_universal_*`). The table then has a last column 'steps', the mean over the patches of the image. A figure
    with the number of steps of each patch is written into the folder `steps` beside the table, under the path of the
    image.

    Args:
        path: The file to write; all processes use the path of the main process.
        class_names: The names of the classes in order.
        step_maps: Whether to write and draw the steps of patches; to count the steps, the model computes every image a
            second time.

    Attributes:
        count: The number of rows. These three attributes are set at the end, only on the main process.
        first: The first ten rows as text, such as 'photo.jpg: bees 0.68'.
        classes: The number of rows with each class, by the name of the class; empty for a multi-label classifier.
    """

    def __init__(self, path: Path, class_names: Sequence[str], step_maps: bool = False) -> None:
        super().__init__(write_interval="batch")
        self.path: Path = path
        self.class_names: list[str] = list(class_names)
        self.step_maps = step_maps
        self.count: int = 0
        self.classes: Counter[str] = Counter()
        self.first: list[str] = []
        self._part: TextIO | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._labels: Labels = pl_module.labels
        self.path = Path(trainer.strategy.broadcast(str(self.path)))
        part = self._part_of(trainer.global_rank)
        try:
            self._part = open(part, "w", encoding="utf-8")  # noqa: SIM115 (closed at the end)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"no folder {part.parent} on this machine: give a folder that all machines see (--runs)"
            ) from error

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: dict[str, Any],
        batch_indices: Any,
        batch: tuple[ImageBatch, list[str]],
        *_: Any,
    ) -> None:
        names = prediction["names"]
        rows = self._labels.predicted(prediction["probabilities"], self.class_names)
        steps = self._draw_steps(trainer, pl_module, batch) if self.step_maps and names else [[]] * len(names)
        for name, found, extra in zip(names, rows, steps, strict=True):
            # Write lines of JSON, since `csv.reader` would refuse cells of more than 131,072 characters, such as the
            # names of thousands of classes.
            self._part.write(json.dumps([printable(name), *self._labels.cells(found), *extra]) + "\n")

    def _draw_steps(
        self, trainer: Trainer, pl_module: LightningModule, batch: tuple[ImageBatch, list[str]]
    ) -> list[list[str]]:
        """Draw the figures of a batch, and return the last column of its rows."""
        images, names = batch
        net, data = pl_module.net, trainer.datamodule
        maps = [steps.cpu().numpy() for steps in net.step_maps(images)]
        for image, steps, name in zip(images_of(images), maps, names, strict=True):
            # Replace '..' by "up", so that the figures of ../a.png and a.png are two files in the folder `steps`.
            parts = ["up" if part == os.pardir else part for part in Path(printable(name)).parts if part != os.sep]
            target = self.path.parent.joinpath("steps", *parts[:-1], f"{parts[-1]}.png")
            plot_steps(picture_of(image, data.mean, data.std), steps, net.steps, target)
        return [[f"{steps.mean():.4f}"] for steps in maps]

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge the rows of all processes."""
        self._part.close()
        # The main process reads the files of all processes, so wait until all have closed their files.
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            self._merge(trainer.datamodule.dataset("predict"), trainer.world_size)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._part is not None:
            # Closing writes the last rows, which fails on a full disk. Ignore this error, because the exception that
            # ended the run is reported.
            with suppress(OSError):
                self._part.close()
            self._part_of(trainer.global_rank).unlink(missing_ok=True)

    def _part_of(self, rank: int) -> Path:
        return self.path.with_name(f".{self.path.name}.{rank}.part")

    def _merge(self, dataset: Any, processes: int) -> None:
        header = ["path", *self._labels.columns(min(TOP, len(self.class_names))), *["steps"] * self.step_maps]
        parts = [self._part_of(rank) for rank in range(processes)]
        with atomic_write(self.path) as path, ExitStack() as stack:
            table = csv.writer(stack.enter_context(open(path, "w", newline="", encoding="utf-8")))
            rows = [map(json.loads, stack.enter_context(open(part, encoding="utf-8"))) for part in parts]
            table.writerow(header)
            for row in _in_order(dataset, rows):
                table.writerow(row)
                self.count += 1
                if self.count <= LISTED:
                    self.first.append(_in_words(*row[:3]))
                if "class" in header:
                    self.classes[row[header.index("class")]] += 1
        for part in parts:
            part.unlink()


def _in_words(path: str, classes: str, probabilities: str) -> str:
    """Name the image and its class with the probability; all classes of a multi-label image."""
    values = [f"{float(each):.2f}" for each in probabilities.split(";") if each]
    names = classes.split(";") if len(values) > 1 else [classes]
    return f"{path}: {', '.join(map(' '.join, zip(names, values, strict=False))) or 'no class'}"


def _in_order(dataset: Any, rows: Sequence[Iterator[list[str]]]) -> Iterator[list[str]]:
    """Yield the rows of all processes in the order of the data."""
    paths = [printable(str(path)) for path in dataset.paths] if isinstance(dataset, NamedFiles) else None
    heads = [next(rest, None) for rest in rows]
    for index in range(len(dataset)):
        rank = rank_of(index, len(rows))
        row = heads[rank]
        # The row is this image's row if it has the image's path: unreadable images, and images beyond
        # --trainer.limit_predict_batches, have no rows.
        if row is not None and (paths is None or row[0] == paths[index]):
            yield row
            heads[rank] = next(rows[rank], None)
    assert not any(heads), f"{heads} are of none of the images"
