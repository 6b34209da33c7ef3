"""Training history: write `metrics.csv`, the TensorBoard log and `curves.png` of a run, also if it is resumed."""

from __future__ import annotations

import csv
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning import Callback, LightningModule, Trainer

from relvit.app.plots import plot_curves
from relvit.app.training.callbacks.telemetry import Telemetry
from relvit.app.training.metrics import computed, current_lr
from relvit.app.utils.files import atomic_write

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

ROW_KEYS = ("epoch", "step")


class History(Callback):
    """Write `metrics.csv` and a TensorBoard log, with a row for each epoch and for each validation within an epoch.

    A row has `epoch` (counted from 0, while progress bars count from 1), `step` (optimiser steps so far), `train/...`,
    the learning rate `lr` at the end of the epoch, `val/...`, and `system/...` (see `Telemetry`). Every checkpoint
    holds the rows: a resumed training first rewrites the files as they were at the checkpoint, so that the files have
    neither gaps nor duplicate rows. `curves.png` is drawn when the training ends, even with an error.

    Args:
        folder: The folder to write to.
        telemetry: The callback that measures the epochs.
        tensorboard: Whether to write the TensorBoard log, into the folder `tensorboard`.
    """

    def __init__(self, folder: Path, telemetry: Telemetry, tensorboard: bool = True) -> None:
        self.folder = folder
        self.telemetry = telemetry
        self.rows: list[dict[str, float]] = []
        self.tensorboard = tensorboard
        self._writer: SummaryWriter | None = None
        # This is the legend of the training curve, None in all processes but the main one, which alone draws curves.
        self._legend: str | None = None

    def state_dict(self) -> dict[str, Any]:
        if self._writer is not None:
            self._writer.flush()
        return {"rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [dict(row) for row in state_dict["rows"]]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._legend = _training_legend(pl_module)
        if self.tensorboard:
            log = self.folder / "tensorboard"
            if log.exists():
                # If TensorBoard still reads a file, NFS keeps this file under another name, so the folder itself may
                # stay.
                shutil.rmtree(log, ignore_errors=True)
            # Import the package only for a training with a TensorBoard log, since the import takes a while.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log)
            for row in self.rows:
                self._write_scalars(row)
        if self.rows:
            self._write_table()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            metrics = trainer.callback_metrics
            self._add(trainer, {name: float(v) for name, v in metrics.items() if name.startswith("val/")})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = computed(pl_module.train_metrics) | computed(pl_module.step_metrics)
        row = {name: float(value) for name, value in metrics.items()}
        self._add(trainer, row | {"lr": current_lr(trainer)} | self.telemetry.measured(trainer))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # On a full disk, closing the log raises an OSError. Suppress this error, so that other callbacks still save a
        # checkpoint.
        with suppress(OSError):
            self._close()

    def _add(self, trainer: Trainer, values: dict[str, float]) -> None:
        """Add values to the row of this epoch and step, or a new row."""
        row = {"epoch": trainer.current_epoch, "step": trainer.global_step} | values
        if self.rows and all(self.rows[-1][key] == row[key] for key in ROW_KEYS):
            self.rows[-1].update(row)
        else:
            self.rows.append(row)
        if trainer.is_global_zero:
            self._write_table()
            self._write_scalars(row)

    def _write_table(self) -> None:
        columns = [*ROW_KEYS, *sorted({name for row in self.rows for name in row} - set(ROW_KEYS))]
        with atomic_write(self.folder / "metrics.csv") as path, open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def _write_scalars(self, row: dict[str, float]) -> None:
        if self._writer is not None:
            for name in row:
                if name not in ROW_KEYS:
                    self._writer.add_scalar(name, row[name], int(row["step"]))

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._legend and self.rows and (self.folder / "metrics.csv").is_file():
            plot_curves(self.folder / "metrics.csv", self.folder / "curves.png", self._legend)


def _training_legend(classifier: LightningModule) -> str:
    """Name the differences of the training loss from the validation loss, which is plain (binary) cross-entropy."""
    options = classifier.hparams
    parts = [
        ("binary", classifier.loss.kind == "bce" != classifier.labels.loss),
        ("asymmetric", classifier.loss.kind == "asl"),
        (f"labels smoothed by {options.label_smoothing:g}", options.label_smoothing),
        ("mixed images", classifier.mixing is not None),
        ("weighted classes", classifier.loss.weights is not None),
        ("with a teacher", options.teacher),
    ]
    applying = ",\n".join(text for text, applies in parts if applies)
    return f"train ({applying})" if applying else "train"
