"""Callbacks that let a training meet with an accident; command lines name them as `failures.NAME`."""

import os
import signal
from pathlib import Path

from lightning import Callback

DISK, SPARE = "FULL_DISK", "FULL_DISK_SPARE"


def fill(disk, spare=0):
    """Leave so many bytes of a disk."""
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
        file.truncate(max(0, file.tell() - spare))


class Fill(Callback):
    """Fills the disk in the second epoch, as the environment says."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1 and DISK in os.environ:
            fill(Path(os.environ[DISK]), int(os.environ[SPARE]))


class KillWorker(Callback):
    """Kills a process that loads images to train on, in the second epoch of a training that did not begin in it."""

    def on_train_start(self, trainer, pl_module):
        self.begun = trainer.current_epoch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (self.begun, trainer.current_epoch, batch_idx) == (0, 1, 1):
            worker = trainer.train_dataloader._iterator._workers[0]
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()


class Stop(Callback):
    """Presses Ctrl-C before the second batch of the second epoch, in a training that did not begin in it."""

    def on_train_start(self, trainer, pl_module):
        self.begun = trainer.current_epoch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (self.begun, trainer.current_epoch, batch_idx) == (0, 1, 1):
            raise KeyboardInterrupt
