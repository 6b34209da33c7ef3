"""The progress bar of a training."""

from __future__ import annotations

import shutil
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from relvit.training.callbacks.pace import Pace, clock, epoch_title

# What there is room for in one line: in a terminal of this width, and in a narrower one.
WIDE = 140
SHOWN, SHOWN_IF_NARROW = ("loss", "acc", "val/loss", "val/acc1"), ("loss", "acc")


class TrainingProgressBar(RichProgressBar):
    """Lightning's bar with epochs counted from 1 and with the time that is left of the whole training.

    `loss` and `acc` are means of the epoch so far, over the images of the main process; `val/...` are the last
    validation's, shown in a wide terminal.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pace: Pace | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pace = Pace(trainer)
        super().on_train_start(trainer, pl_module)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, int | str | float]:
        """First the time that is left, then the metrics."""
        if trainer.sanity_checking:
            return {}
        metrics = super().get_metrics(trainer, pl_module)
        names = SHOWN if _is_wide() else SHOWN_IF_NARROW
        shown = {name: metrics[name] for name in names if name in metrics}
        remaining = self._pace.remaining(trainer) if self._pace else None
        return ({} if remaining is None else {"remaining": clock(remaining)}) | shown

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """In a narrow terminal neither the time of the epoch nor the speed: description, bar and count."""
        columns = super().configure_columns(trainer)
        if _is_wide():
            return columns
        columns[1].bar_width = 10
        return columns[:3]

    def _get_train_description(self, current_epoch: int) -> str:
        # Padded, so that it does not jump when the validation's takes its place.
        return f"Epoch {epoch_title(self.trainer, current_epoch)}".ljust(len(self.validation_description))


def _is_wide() -> bool:
    return shutil.get_terminal_size().columns >= WIDE
