"""A line for each epoch of a training."""

from __future__ import annotations

from lightning import Callback, LightningModule, Trainer

from relvit.training.callbacks.history import History
from relvit.training.callbacks.pace import Pace, clock, epoch_title
from relvit.utils.progress import rank_zero_print


class EpochLines(Callback):
    """Prints a line at the end of each epoch, for files and wherever there is no progress bar.

    Args:
        history: of the same training, a callback that comes earlier; the numbers are those of its last row.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self._pace: Pace | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pace = Pace(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        row = self.history.rows[-1]
        parts = [
            f"{title} {row[name]:{digits}}"
            for name, title, digits in (
                ("train/loss", "train loss", ".4f"),
                # An epoch without validation has none.
                ("val/loss", "val loss", ".4f"),
                ("val/acc1", "val accuracy", ".4f"),
                ("lr", "lr", ".3g"),
            )
            if name in row
        ]
        if (speed := row.get("system/images_per_second")) is not None:
            parts.append(f"{speed:.0f} images/s")
        parts.append(f"elapsed {clock(self._pace.elapsed)}")
        if (remaining := self._pace.remaining(trainer)) is not None:
            parts.append(f"remaining {clock(remaining)}")
        rank_zero_print(f"epoch {epoch_title(trainer, trainer.current_epoch)}: {', '.join(parts)}")
