"""What is written while a run goes on."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO

import torch.distributed
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from relvit.data import ImageData
from relvit.data.images.datasets import NamedFiles
from relvit.utils.files import atomic_write
from relvit.utils.messages import printable

# Classes named for each image.
TOP = 5


class PredictionTable(BasePredictionWriter):
    """Writes `predictions.csv`, a row per image in the order of the data: path, class and probability of the most
    probable class, then those of the following ones (class2, probability2 ...) up to the fifth, as far as there are.

    On any number of devices: each process writes the rows of its share into a file of its own beside the table, and the
    main one merges them at the end. So all machines have to see the folder. The table is there whole or not at all.

    Args:
        path: the file to write; that of the main process counts.
        class_names: names of the classes in order.

    Attributes:
        count: number of rows, after the end and on the main process.
    """

    def __init__(self, path: Path, class_names: Sequence[str]) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self.class_names = list(class_names)
        self.shown = min(TOP, len(self.class_names))
        self.count = 0
        self._part: TextIO | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.path = Path(trainer.strategy.broadcast(str(self.path)))
        part = self._part_of(trainer.global_rank)
        try:
            self._part = open(part, "w", newline="", encoding="utf-8")  # noqa: SIM115 (closed at the end)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"no folder {part.parent} on this machine: give a folder that all machines see (--runs)"
            ) from error

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: dict[str, Any],
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        best, indices = prediction["probabilities"].topk(self.shown)
        rows = []
        for name, values, numbers in zip(prediction["names"], best.tolist(), indices.tolist(), strict=True):
            pairs = zip(numbers, values, strict=True)
            cells = [cell for n, value in pairs for cell in (self.class_names[n], f"{value:.6f}")]
            rows.append([printable(name), *cells])
        csv.writer(self._part).writerows(rows)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge, once all processes have written their rows."""
        self._part.close()
        unreadable = [self._unreadable(trainer)]
        if trainer.world_size > 1:
            own, unreadable = unreadable[0], [{} for _ in range(trainer.world_size)]
            torch.distributed.all_gather_object(unreadable, own)
        if trainer.is_global_zero:
            self._merge(trainer.datamodule.dataset("predict"), unreadable)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Half a table is none."""
        if self._part is not None:
            # What is still in memory may find no room on the disk.
            with suppress(OSError):
                self._part.close()
            self._part_of(trainer.global_rank).unlink(missing_ok=True)

    def _part_of(self, rank: int) -> Path:
        return self.path.with_name(f".{self.path.name}.{rank}.part")

    def _unreadable(self, trainer: Trainer) -> dict[str, str]:
        data = trainer.datamodule
        return dict(data.unreadable.get("predict", {})) if isinstance(data, ImageData) else {}

    def _merge(self, dataset: Any, unreadable: Sequence[Mapping[str, str]]) -> None:
        places = ["", *map(str, range(2, self.shown + 1))]
        header = ["path", *(f"{column}{place}" for place in places for column in ("class", "probability"))]
        parts = [self._part_of(rank) for rank in range(len(unreadable))]
        with atomic_write(self.path) as path, ExitStack() as stack:
            table = csv.writer(stack.enter_context(open(path, "w", newline="", encoding="utf-8")))
            rows = [csv.reader(stack.enter_context(open(part, newline="", encoding="utf-8"))) for part in parts]
            table.writerow(header)
            for row in _in_order(dataset, rows, unreadable):
                table.writerow(row)
                self.count += 1
        for part in parts:
            part.unlink()


def _in_order(
    dataset: Any, rows: Sequence[Iterator[list[str]]], unreadable: Sequence[Mapping[str, str]]
) -> Iterator[list[str]]:
    """The rows of all processes, each of which has those of its share that could be read, in the order of the data."""
    paths = [str(path) for path in dataset.paths] if isinstance(dataset, NamedFiles) else None
    for index in range(len(dataset)):
        # As ImageData deals them out.
        rank = index % len(rows)
        if paths is not None and paths[index] in unreadable[rank]:
            continue
        # There are fewer where the Trainer was told to predict only some batches.
        row = next(rows[rank], None)
        if row is not None:
            assert paths is None or row[0] == printable(paths[index]), f"{row[0]} in the place of {paths[index]}"
            yield row
    assert not any(next(rest, None) for rest in rows), "more rows than images"
