"""What is written while a run goes on."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from relvit.names import printable

# Classes named for each image.
TOP = 5


class PredictionTable(BasePredictionWriter):
    """Writes `predictions.csv`, a row per image, as the predictions come: path, class and probability of the most
    probable class, then those of the following ones (class2, probability2 ...) up to the fifth, as far as there are.

    Args:
        path: the file to write.
        class_names: names of the classes in order.
    """

    def __init__(self, path: Path, class_names: Sequence[str]) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self.class_names = list(class_names)
        self.shown = min(TOP, len(self.class_names))
        self.count = 0

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        places = ["", *map(str, range(2, self.shown + 1))]
        self._append([["path", *(f"{column}{place}" for place in places for column in ("class", "probability"))]], "w")

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
        self._append(rows)
        self.count += len(rows)

    def _append(self, rows: list[list[str]], mode: str = "a") -> None:
        with open(self.path, mode, newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
