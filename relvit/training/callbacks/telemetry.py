"""Telemetry: images per second, share of time that waits for data, and peak memory of each training epoch."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint


# A `Checkpoint`, since Lightning calls those last: the time that other callbacks take is no waiting for data.
class Telemetry(Checkpoint):
    """Measures each epoch, without its validation.

    - `system/images_per_second`: over all devices.
    - `system/data_wait`: share of the time in which the main process waited for the next batch. (The optimiser step
      waits for the device, so that a GPU that idles for want of images shows here.)
    - `system/memory_gb`: the peak memory allocated on this process's GPU, or of the process on a CPU; 1e9 bytes.
    """

    def __init__(self) -> None:
        self._images = 0
        self._waited = self._worked = 0.0
        self._lap_started = 0.0

    def measured(self, trainer: Trainer) -> dict[str, float]:
        """Return the three figures of the epoch so far; none before its first batch is done."""
        total = self._waited + self._worked
        if not total:
            return {}
        device = trainer.strategy.root_device
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device)
        else:
            # Bytes on a Mac, else kB.
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {
            "system/images_per_second": self._images * trainer.world_size / total,
            "system/data_wait": self._waited / total,
            "system/memory_gb": memory / 1e9,
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A training that is resumed within an epoch does not start that epoch again.
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._images, self._waited, self._worked = 0, 0.0, 0.0
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)
        self._lap()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._waited += self._lap()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._worked += self._lap()
        self._images += len(batch[1])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._lap()

    def _lap(self) -> float:
        """Return the seconds since the last call."""
        before, self._lap_started = self._lap_started, time.perf_counter()
        return self._lap_started - before
