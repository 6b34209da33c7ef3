"""The checkpoints of a run, and how it stops when it is told to."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from relvit.training.checkpoints.disk import check_room, checkpoint_size
from relvit.training.lightning_internals import stepped_within_epoch
from relvit.training.optim.gradients import NonFiniteLossError
from relvit.utils.atomic_write import DISK_ERRORS

# As a batch system announces the end of a job's time.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def ignore_stop_signals() -> None:
    """From now on the process ends by itself."""
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


class StoppedBySignalError(SystemExit):
    """A training that was told to stop has saved where it was; the exit status is 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)


class RunCheckpoints(Checkpoint):
    """Writes `best.ckpt` when the validation score is higher than before, or the same with a lower `val/loss`, which
    decides often where few images validate; and `last.ckpt` at the end of each epoch.

    And `last.ckpt` besides every so many steps; at the first optimiser step after SIGTERM or SIGUSR1, or within a
    validation, before the run stops; and when an exception ends it. From every one of them the training goes on as if
    it had not been interrupted.

    Args:
        folder: where to write.
        every_n_steps: optimiser steps between two further writings of `last.ckpt`; none: no further ones.
        monitor: the metric that decides.

    Raises:
        ValueError: `every_n_steps` is not positive.
    """

    def __init__(self, folder: Path, every_n_steps: int | None = None, monitor: str = "val/acc1") -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"save_every must be 1 step or more, got {every_n_steps}")
        self.folder = folder
        self.every_n_steps = every_n_steps
        self.monitor = monitor
        self.best_model_score: float | None = None
        # Its loss.
        self._best_loss: float | None = None
        self._told: int | None = None
        self._handlers: dict[int, Any] = {}
        # Whether weights, averages and schedule belong to the same step just now.
        self._between_steps = False

    @property
    def best_model_path(self) -> str:
        """Where the best checkpoint is."""
        return str(self.folder / "best.ckpt")

    @property
    def last_path(self) -> Path:
        """Where the last checkpoint is."""
        return self.folder / "last.ckpt"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """All processes name the files of the main one, whose folder it is."""
        self.folder = Path(trainer.strategy.broadcast(str(self.folder)))

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best_model_score, "loss": self._best_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """In another folder the best is still to come."""
        if Path(self.best_model_path).is_file():
            self.best_model_score, self._best_loss = state_dict["best"], state_dict.get("loss")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rather no training than one that cannot be kept.

        Raises:
            NoRoomError: the disk has no room for two checkpoints.
        """
        check_room(self.folder, checkpoint_size(trainer))

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep_signals()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._between_steps = True
        self._keep_signals()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self._between_steps = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._between_steps = True
        # The end of an epoch has a checkpoint of its own.
        if not stepped_within_epoch(trainer):
            return
        self._stop_if_told(trainer)
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0:
            trainer.save_checkpoint(self.last_path)

    def on_validation_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._stop_if_told(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        found = (trainer.callback_metrics.get(name) for name in (self.monitor, "val/loss"))
        score, loss = (None if value is None else float(value) for value in found)
        if score is not None and self._is_better(score, loss):
            self.best_model_score, self._best_loss = score, loss
            trainer.save_checkpoint(self.best_model_path)

    def _is_better(self, score: float, loss: float | None) -> bool:
        before, loss_before = self.best_model_score, self._best_loss
        if before is None or loss is None or loss_before is None:
            return before is None or score > before
        return (score, -loss) > (before, -loss_before)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_if_told(trainer)
        trainer.save_checkpoint(self.last_path)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save what is whole, unless that has just been done."""
        if isinstance(exception, StoppedBySignalError):
            # Launchers like to say it twice, which must not change the exit status any more.
            ignore_stop_signals()
            return
        self._restore_handlers()
        whole = self._between_steps or isinstance(exception, NonFiniteLossError)
        full = isinstance(exception, OSError) and exception.errno in DISK_ERRORS
        # Where one process of several fails, it cannot wait for the others.
        if whole and trainer.world_size == 1 and not full:
            try:
                trainer.save_checkpoint(self.last_path)
            except OSError as error:
                # What went wrong first is what is to be told.
                rank_zero_warn(str(error))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore_handlers()

    def _keep_signals(self) -> None:
        """From here on signals are kept until they can be obeyed.

        Lightning's handlers stop between batches, one of several processes alone, and in a job of Slurm save by their
        own rules; they are registered just before.
        """
        if not self._handlers and threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._tell) for number in STOP_SIGNALS}

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told = number

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _stop_if_told(self, trainer: Trainer) -> None:
        """Save and raise StoppedBySignalError in all processes if one of them was told to stop."""
        told = self._told or 0
        if trainer.world_size > 1:
            told = int(
                trainer.strategy.reduce(torch.tensor(told, device=trainer.strategy.root_device), reduce_op="max")
            )
        if told:
            trainer.save_checkpoint(self.last_path)
            raise StoppedBySignalError(told)
