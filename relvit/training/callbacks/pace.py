"""How long a training has taken and will still take."""

from __future__ import annotations

import math
import time
from datetime import timedelta

from lightning import Trainer


class Pace:
    """Estimates the time that is left from the time that the optimiser steps so far have taken, validations included.

    Where a training goes on, that is from there.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._start = time.monotonic()
        self._step = trainer.global_step

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def remaining(self, trainer: Trainer) -> float | None:
        """Seconds until the last epoch or step; None before the first step, or for a training without end."""
        done, steps = trainer.global_step - self._step, trainer.estimated_stepping_batches
        if not done or not math.isfinite(steps):
            return None
        return self.elapsed / done * max(0, steps - trainer.global_step)


def clock(seconds: float) -> str:
    """A duration as hours:minutes:seconds."""
    return str(timedelta(seconds=round(seconds)))


def count_epochs(trainer: Trainer) -> int | None:
    """Epochs of the whole training, also where --trainer.max_steps ends it; None if nothing says how many."""
    steps, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
    if not math.isfinite(steps) or not math.isfinite(batches):
        return trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else None
    return math.ceil(steps / math.ceil(batches / trainer.accumulate_grad_batches))


def epoch_title(trainer: Trainer, epoch: int) -> str:
    """Which epoch of how many, counted from 1; `epoch` counts from 0."""
    total = count_epochs(trainer)
    return f"{epoch + 1}" if total is None else f"{epoch + 1}/{total}"
