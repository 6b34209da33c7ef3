"""`RunCheckpoints`: the callback that writes best.ckpt and last.ckpt, also when SIGTERM or SIGUSR1 stops a training."""

from __future__ import annotations

import math
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from relvit.app.data.loading.sampler import all_batches_done
from relvit.app.training.checkpoints.exact_resume import is_last_of_epoch
from relvit.app.training.checkpoints.file import EPOCH_NAME, check_disk_space
from relvit.app.training.optim.gradients import NonFiniteLossError
from relvit.app.utils.files import DISK_ERRORS, link_or_copy

# Batch systems such as Slurm send one of these signals shortly before the time of a job ends.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def ignore_stop_signals() -> None:
    """Ignore SIGTERM and SIGUSR1 in this process from now on."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


class StoppedBySignalError(SystemExit):
    """A signal has stopped the training after a checkpoint; the exit status is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal: signal.Signals = signal.Signals(number)


class RunCheckpoints(Checkpoint):
    """Write `last.ckpt` at the end of each epoch and `best.ckpt` at the best validation score so far.

    `epoch.ckpt` is the checkpoint of the last complete epoch: a hard link to `last.ckpt`, or a copy on disks without
    links. `epoch.ckpt` stays when a new `last.ckpt` is written within an epoch. From `epoch.ckpt` a training can go on
    with another number of devices, which is impossible from a checkpoint within an epoch.

    If two validations have equal scores, which is frequent with few images, the validation with the lower `val/loss` is
    better. `last.ckpt` is also written every `every_n_steps` optimiser steps, when an exception ends a run of one
    process between two optimiser steps, and when SIGTERM or SIGUSR1 stops the run. A signal stops the run after the
    next optimiser step or the next batch of a validation. A training resumes exactly from each of these checkpoints.

    Args:
        folder: The folder to write to.
        every_n_steps: The number of optimiser steps after which `last.ckpt` is written within an epoch. None:
            `last.ckpt` is written only at the end of epochs.
        monitor: The metric whose highest value is best.

    Raises:
        ValueError: `every_n_steps` is not positive.
    """

    def __init__(self, folder: Path, every_n_steps: int | None = None, monitor: str = "val/acc1") -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"save_every must be 1 step or more, got {every_n_steps}")
        self.folder: Path = folder
        self.every_n_steps = every_n_steps
        self.monitor = monitor
        self.best_model_score: float | None = None
        # `best_epoch` counts epochs from 1.
        self.best_epoch: int | None = None
        self._best_loss: float | None = None
        self._signal: int = 0
        self._handlers: dict[int, Any] = {}
        # Weights, averages and schedule belong to the same step only between two optimiser steps. If an exception comes
        # at any other time, no checkpoint must be written.
        self._between_steps = False

    @property
    def best_model_path(self) -> str:
        """The path of the best checkpoint."""
        return str(self.folder / "best.ckpt")

    @property
    def last_path(self) -> Path:
        """The path of the last checkpoint."""
        return self.folder / "last.ckpt"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Use the folder of the main process in all processes.

        Raises:
            FileNotFoundError: A process does not see the run's folder, from which it would resume and test.
        """
        folder, made = trainer.strategy.broadcast((str(self.folder), self.folder.parent.is_dir()))
        self.folder = Path(folder)
        if not trainer.strategy.reduce_boolean_decision(self.folder.parent.is_dir() or not made):
            raise FileNotFoundError(f"not all machines see the folder {folder}: give one that they share (--runs)")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best_model_score, "loss": self._best_loss, "epoch": self.best_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score, unless the run writes to another folder."""
        if Path(self.best_model_path).is_file():
            self.best_model_score, self._best_loss = state_dict["best"], state_dict["loss"]
            self.best_epoch = state_dict["epoch"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise a DiskSpaceError before the training if the disk has no space for the checkpoints."""
        check_disk_space(self.folder, trainer)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._catch_signals()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._between_steps = True
        self._catch_signals()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._between_steps = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._between_steps = True
        # Save only after an optimiser step, and not at the end of an epoch, where `on_train_epoch_end` saves.
        if (batch_idx + 1) % trainer.accumulate_grad_batches or is_last_of_epoch(trainer, batch_idx):
            return
        self._stop_after_signal(trainer)
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            trainer.save_checkpoint(self.last_path)

    def on_validation_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._stop_after_signal(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        found = (trainer.callback_metrics.get(name) for name in (self.monitor, "val/loss"))
        score, loss = (None if value is None else float(value) for value in found)
        best, best_loss = self.best_model_score, self._best_loss
        # A loss may be NaN, and the mean average precision of images without labels is. NaN is neither below nor above
        # any number, so take it as the worst value: otherwise no later checkpoint would replace the first one.
        rank, best_rank = (-math.inf if value is None or math.isnan(value) else value for value in (score, best))
        cost, best_cost = (math.inf if value is None or math.isnan(value) else value for value in (loss, best_loss))
        if score is not None and (best is None or rank > best_rank or (rank == best_rank and cost < best_cost)):
            self.best_model_score, self._best_loss, self.best_epoch = score, loss, trainer.current_epoch + 1
            # If an error or Ctrl-C ends the writing, `best.ckpt` is older than the best score. No `last.ckpt` must hold
            # this score then: a training that resumes from it would not repeat the validation.
            self._between_steps = False
            trainer.save_checkpoint(self.best_model_path)
            self._between_steps = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_after_signal(trainer)
        trainer.save_checkpoint(self.last_path)
        # `epoch.ckpt` must be from a complete epoch, but a limit of steps may have ended the training within the epoch.
        if trainer.is_global_zero and all_batches_done(trainer):
            link_or_copy(self.last_path, self.last_path.with_name(EPOCH_NAME))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save the training if its state is consistent and not saved yet; a test or a validation changes no file."""
        if isinstance(exception, StoppedBySignalError):
            # A second signal, which the program that started this one may send, must not change the exit status, so
            # ignore it.
            ignore_stop_signals()
            return
        self._restore_handlers()
        # Save only in a training. In the test that follows, the model has the weights of the best checkpoint, which
        # must not replace the weights in `last.ckpt`.
        if trainer.state.fn != "fit":
            return
        consistent = self._between_steps or isinstance(exception, NonFiniteLossError)
        full = isinstance(exception, OSError) and exception.errno in DISK_ERRORS
        # Save only in a run of one process: saving waits for all processes, and processes that have not failed never
        # begin to save.
        if consistent and trainer.world_size == 1 and not full:
            try:
                trainer.save_checkpoint(self.last_path)
            except OSError as error:
                # Only warn that saving failed: Lightning raises `exception`, the error that ended the run.
                rank_zero_warn(str(error))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore_handlers()

    def _catch_signals(self) -> None:
        """Replace the signal handlers that Lightning has just registered with a handler that records the signal.

        Lightning's handlers would stop between accumulated batches, would stop only one of several processes, and
        would, in a job of Slurm, write a checkpoint of Lightning's own instead of `last.ckpt`.
        """

        def note(number: int, frame: FrameType | None) -> None:
            self._signal = number

        if not self._handlers and threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, note) for number in STOP_SIGNALS}

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _stop_after_signal(self, trainer: Trainer) -> None:
        """Save the training and raise StoppedBySignalError in all processes if one of them has caught a signal."""
        number = self._signal
        if trainer.world_size > 1:
            tensor = torch.tensor(number, device=trainer.strategy.root_device)
            number = int(trainer.strategy.reduce(tensor, reduce_op="max"))
        if number:
            trainer.save_checkpoint(self.last_path)
            raise StoppedBySignalError(number)
