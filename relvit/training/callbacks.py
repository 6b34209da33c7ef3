"""What is written while a run goes on."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import CSVLogger

from relvit.plots import plot_curves


class TrainingCurves(Callback):
    """Draws loss and accuracy into `curves.png` beside the run's `metrics.csv` when training ends, however it ends."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                logger.save()
                metrics = Path(logger.log_dir) / "metrics.csv"
                if metrics.is_file():
                    plot_curves(metrics, metrics.with_name("curves.png"))


class PredictionTable(BasePredictionWriter):
    """Writes `predictions.csv`: image, class and probability, a row per image, as the predictions come.

    Args:
        path: the file to write.
        class_names: names of the classes in order.
    """

    def __init__(self, path: Path, class_names: Sequence[str]) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self.class_names = list(class_names)
        self.count = 0

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with open(self.path, "w", newline="") as file:
            csv.writer(file).writerow(["image", "class", "probability"])

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
        best, index = prediction["probabilities"].max(dim=-1)
        with open(self.path, "a", newline="") as file:
            for name, probability, number in zip(prediction["names"], best.tolist(), index.tolist(), strict=True):
                csv.writer(file).writerow([name, self.class_names[number], f"{probability:.4f}"])
                self.count += 1
