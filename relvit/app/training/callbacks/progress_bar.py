"""Progress of a run: Rich's bar on terminals, a printed line per epoch in files, or nothing."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from datetime import timedelta
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from rich.progress import Task, TextColumn
from rich.text import Text

from relvit.app.training.callbacks.history import History
from relvit.app.utils.progress import rank_zero_print

# In a terminal of this many columns, all metrics of `SHOWN` fit into one line.
WIDE = 140
SHOWN, SHOWN_IF_NARROW = ("loss", "acc", "val/loss", "val/acc1", "val/map"), ("loss", "acc")


class TrainingProgressBar(RichProgressBar):
    """Progress bar of Lightning, with epochs counted from 1 and the remaining time of the whole training.

    `loss` and `acc` are means of the epoch so far, over the images of the main process. A wide terminal also shows
    `val/...` of the last validation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock: TrainingClock | None = None
        self._title = EpochTitle()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = TrainingClock(trainer)
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Pad the title to the width of a validation's title, so that the bar does not move when a validation begins.
        self._title.text = f"Epoch {numbered_epoch(trainer)}".ljust(len(self.validation_description))
        super().on_train_epoch_start(trainer, pl_module)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, int | str | float]:
        if trainer.sanity_checking:
            return {}
        metrics = super().get_metrics(trainer, pl_module)
        remaining = self._clock.remaining(trainer) if self._clock else None
        shown = {} if remaining is None else {"remaining": remaining}
        names = SHOWN if _is_wide() else SHOWN_IF_NARROW
        return shown | {name: metrics[name] for name in names if name in metrics}

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        columns = super().configure_columns(trainer)
        columns[0] = self._title
        if _is_wide():
            return columns
        columns[1].bar_width = 10
        # A narrow terminal has no room for the columns of elapsed time and speed, so leave them out.
        return columns[:3]


class EpochTitle(TextColumn):
    """Column of a progress bar that shows `text` instead of Lightning's description "Epoch 0/9".

    It is not enough that a callback replaces Lightning's description: Rich draws in a separate thread, perhaps before
    the callback runs.
    """

    def __init__(self) -> None:
        super().__init__("[progress.description]{task.description}")
        self.text = ""

    def render(self, task: Task) -> Text:
        shown = super().render(task)
        if shown.plain.startswith("Epoch"):
            shown.plain = self.text
        return shown


class EpochLines(Callback):
    """Print a line at the end of each epoch, for output in files and without a progress bar.

    Args:
        history: The training's `History`, whose last row has the printed numbers. The `History` must run before this
            callback.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self._clock: TrainingClock | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = TrainingClock(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        row, parts = self.history.rows[-1], []
        for name, text in (
            ("train/loss", "train loss {:.4f}"),
            ("val/loss", "val loss {:.4f}"),
            ("val/acc1", "val accuracy {:.4f}"),
            ("val/map", "val mAP {:.4f}"),
            ("lr", "lr {:.3g}"),
            ("system/images_per_second", "{:.0f} images/s"),
        ):
            # The row of an epoch without a validation has no `val/...` numbers, so leave them out of the line.
            if name in row:
                parts.append(text.format(row[name]))
        parts.append(f"elapsed {self._clock.elapsed}")
        if (remaining := self._clock.remaining(trainer)) is not None:
            parts.append(f"remaining {remaining}")
        rank_zero_print(f"epoch {numbered_epoch(trainer)}: {', '.join(parts)}")


class TrainingClock:
    """Time since a training started or was resumed, and an estimate of the remaining time."""

    def __init__(self, trainer: Trainer) -> None:
        self._start = time.monotonic()
        self._step = trainer.global_step

    @property
    def elapsed(self) -> str:
        """The time since the start as hours:minutes:seconds."""
        return _duration(time.monotonic() - self._start)

    def remaining(self, trainer: Trainer) -> str | None:
        """Estimate the time to the end as hours:minutes:seconds; None before the first step or without an end."""
        done, steps = trainer.global_step - self._step, trainer.estimated_stepping_batches
        if not done or not math.isfinite(steps):
            return None
        return _duration((time.monotonic() - self._start) / done * max(0, steps - trainer.global_step))


def numbered_epoch(trainer: Trainer) -> str:
    """Format the current epoch, counted from 1, and the number of epochs, as '1/10'; also with --trainer.max_steps."""
    epoch, steps, batches = trainer.current_epoch, trainer.estimated_stepping_batches, trainer.num_training_batches
    if math.isfinite(steps) and math.isfinite(batches):
        return f"{epoch + 1}/{math.ceil(steps / math.ceil(batches / trainer.accumulate_grad_batches))}"
    return f"{epoch + 1}/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else f"{epoch + 1}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _is_wide() -> bool:
    return shutil.get_terminal_size().columns >= WIDE


def progress_callbacks(config: dict[str, Any], history: History | None, quiet: bool) -> list[Callback]:
    """Return the callbacks that show the progress: a bar on terminals, a line for each epoch in files, or nothing.

    The function also changes `enable_progress_bar` and `callbacks` in `config`, the trainer's options. Only a training
    has a `history`.
    """
    if quiet:
        config["enable_progress_bar"] = False
        config["callbacks"] = [callback for callback in config["callbacks"] if not isinstance(callback, ProgressBar)]
        return []
    # In a file, a bar would be a long series of control characters. So output to a file has a bar only if the user asks
    # for one, by `enable_progress_bar` or a callback.
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    own_bar = any(isinstance(callback, ProgressBar) for callback in config["callbacks"])
    if config["enable_progress_bar"] is None:
        config["enable_progress_bar"] = own_bar or terminal
    if history is None:
        return []
    shown: list[Callback] = []
    if config["enable_progress_bar"] and not own_bar:
        shown.append(TrainingProgressBar())
    if not (config["enable_progress_bar"] and terminal):
        shown.append(EpochLines(history))
    return shown
