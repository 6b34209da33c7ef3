"""Callbacks that disturb a training, which command lines name as `failures.NAME`."""

import os
import signal
from pathlib import Path

import torch
from lightning import Callback
from lightning.pytorch.callbacks import ProgressBar

DISK, SPARE = "FULL_DISK", "FULL_DISK_SPARE"


def fill(disk, spare=0):
    """Fill a disk except for a number of bytes."""
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        file.truncate(max(0, file.tell() - spare))


class Fill(Callback):
    """In the second epoch, fill the disk that an environment variable names."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1 and DISK in os.environ:
            fill(Path(os.environ[DISK]), int(os.environ[SPARE]))


class KillWorker(Callback):
    """In the second epoch, kill a worker of the loader, except in a resumed training."""

    def on_train_start(self, trainer, pl_module):
        self.begun = trainer.current_epoch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (self.begun, trainer.current_epoch, batch_idx) == (0, 1, 1):
            worker = trainer.train_dataloader._iterator._workers[0]
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()


class Stop(Callback):
    """Raise KeyboardInterrupt before the second batch of the second epoch, except in a resumed training."""

    def on_train_start(self, trainer, pl_module):
        self.begun = trainer.current_epoch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (self.begun, trainer.current_epoch, batch_idx) == (0, 1, 1):
            raise KeyboardInterrupt


class MetricReader(ProgressBar):
    """A progress bar that reads all metrics in every hook of the main process; other processes must not wait."""

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
    """In the test after a training, send this process the signal that an environment variable names."""

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 1 and "END_TEST" in os.environ:
            os.kill(os.getpid(), getattr(signal, os.environ["END_TEST"]))


class OfADevice(Callback):
    """A callback with a default value that YAML cannot hold."""

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        self.device = device
