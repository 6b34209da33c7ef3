"""Callbacks that disturb a training; command lines name them as `failures.NAME`."""

import os
import signal
from pathlib import Path

import torch
from lightning import Callback
from lightning.pytorch.callbacks import ProgressBar

DISK, SPARE = "FULL_DISK", "FULL_DISK_SPARE"


def fill(disk, spare=0):
    """Fill a disk but for a number of bytes."""
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        file.truncate(max(0, file.tell() - spare))


class Fill(Callback):
    """Fill the disk that the environment names in the second epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1 and DISK in os.environ:
            fill(Path(os.environ[DISK]), int(os.environ[SPARE]))


class KillWorker(Callback):
    """Kill a worker of the training's loader in the second epoch, unless the training resumes there."""

    def on_train_start(self, trainer, pl_module):
        self.begun = trainer.current_epoch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (self.begun, trainer.current_epoch, batch_idx) == (0, 1, 1):
            worker = trainer.train_dataloader._iterator._workers[0]
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()


class Stop(Callback):
    """Press Ctrl-C before the second batch of the second epoch, unless the training resumes there."""

    def on_train_start(self, trainer, pl_module):
        self.begun = trainer.current_epoch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (self.begun, trainer.current_epoch, batch_idx) == (0, 1, 1):
            raise KeyboardInterrupt


class MetricReader(ProgressBar):
    """A progress bar that reads all metrics in every hook on the main process; the others must not wait for it."""

    def __init__(self):
        super().__init__()
        self.enabled = True

    def disable(self):
        self.enabled = False

    def read(self, trainer, pl_module, *_, **__):
        if self.enabled:
            self.get_metrics(trainer, pl_module), trainer.callback_metrics, trainer.logged_metrics

    on_train_start = on_train_epoch_start = on_train_batch_start = on_before_optimizer_step = on_train_batch_end = read
    on_validation_start = on_validation_epoch_start = on_validation_batch_start = on_validation_batch_end = read
    on_test_start = on_test_epoch_start = on_test_batch_start = on_test_batch_end = read
    on_train_epoch_end = on_validation_epoch_end = on_test_epoch_end = read
    on_validation_end = on_test_end = on_train_end = on_fit_end = read


class EndTest(Callback):
    """Send this process the signal that the environment names, in the test after a training."""

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 1 and "END_TEST" in os.environ:
            os.kill(os.getpid(), getattr(signal, os.environ["END_TEST"]))


class OfADevice(Callback):
    """A callback with a default that no configuration can hold."""

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        self.device = device
