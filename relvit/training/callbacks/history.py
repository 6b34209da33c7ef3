"""The course of a run: one table, from which its files are made, and which its checkpoints carry along."""

from __future__ import annotations

import csv
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch.utils.tensorboard import SummaryWriter

from relvit.plots import plot_curves
from relvit.training.callbacks.telemetry import Telemetry
from relvit.training.epoch_metrics import current_lr
from relvit.utils.files import atomic_write

PLACE = ("epoch", "step")


class History(Callback):
    """Writes `metrics.csv` and a TensorBoard log: a row for each epoch, and for each validation within one.

    A row has `epoch` (0 is the first, while what people read counts from 1) and `step` (optimiser steps so far),
    `train/...`, the learning rate `lr` at its end, `val/...`, and `system/...` (see `Telemetry`). The rows are part of
    every checkpoint: a training that goes on from one first brings the files to where that checkpoint was, so that they
    have neither gap nor duplicate. `curves.png` is drawn when training ends, however it ends.

    Args:
        folder: where to write.
        telemetry: measures the epochs.
        tensorboard: whether to write the TensorBoard log, into the folder `tensorboard`.
    """

    def __init__(self, folder: Path, telemetry: Telemetry, tensorboard: bool = True) -> None:
        self.folder = folder
        self.telemetry = telemetry
        self.rows: list[dict[str, float]] = []
        self.tensorboard = tensorboard
        self._writer: SummaryWriter | None = None
        # What its curve is called; none before there is anything to draw that has not been drawn.
        self._train_loss: str | None = None

    def state_dict(self) -> dict[str, Any]:
        """The rows so far."""
        if self._writer is not None:
            self._writer.flush()
        return {"rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after those rows."""
        self.rows = [dict(row) for row in state_dict["rows"]]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the files to where the training is."""
        if not trainer.is_global_zero:
            return
        self._train_loss = _name_of_loss(pl_module)
        if self.tensorboard:
            log = self.folder / "tensorboard"
            if log.exists():
                shutil.rmtree(log)
            self._writer = SummaryWriter(log)
            for row in self.rows:
                self._show(row)
        if self.rows:
            self._write()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            found = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("val/")}
            self._add(trainer, found)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Every process computes, the main one writes."""
        computed = pl_module.train_metrics.compute() | pl_module.step_metrics.compute()
        found = {name: float(value) for name, value in computed.items()}
        found["lr"] = current_lr(trainer)
        self._add(trainer, found | self.telemetry.measured(trainer))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # On a full disk the log cannot even be closed, and the checkpoint is still to be saved.
        with suppress(OSError):
            self._close()

    def _add(self, trainer: Trainer, found: dict[str, float]) -> None:
        """A row, or the rest of the one that is there for this epoch and step."""
        place = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        if self.rows and all(self.rows[-1][name] == place[name] for name in PLACE):
            self.rows[-1].update(found)
        else:
            self.rows.append(place | found)
        if trainer.is_global_zero:
            self._write()
            self._show(place | found)

    def _write(self) -> None:
        columns = [*PLACE, *sorted({name for row in self.rows for name in row} - set(PLACE))]
        with atomic_write(self.folder / "metrics.csv") as path, open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def _show(self, row: dict[str, float]) -> None:
        if self._writer is None:
            return
        for name, value in row.items():
            if name not in PLACE:
                self._writer.add_scalar(name, value, int(row["step"]))

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._train_loss and self.rows and (self.folder / "metrics.csv").is_file():
            plot_curves(self.folder / "metrics.csv", self.folder / "curves.png", self._train_loss)


def _name_of_loss(classifier: LightningModule) -> str:
    """What the curve of the training loss is called, which validation computes as plain cross-entropy."""
    options = classifier.hparams
    parts = [
        ("binary", options.loss == "bce"),
        (f"labels smoothed by {options.label_smoothing:g}", options.label_smoothing),
        ("mixed images", classifier.mixing is not None),
        ("weighted classes", classifier.loss.weights is not None),
        ("with a teacher", options.teacher),
    ]
    told = ",\n".join(text for text, applies in parts if applies)
    return f"train ({told})" if told else "train"
