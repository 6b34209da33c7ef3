"""Telemetry: images per second, share of the time spent waiting for data, and peak memory of each training epoch."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint


# Derive from `Checkpoint`, because Lightning calls such callbacks last: so the time of other callbacks does not count
# as waiting for data.
class Telemetry(Checkpoint):
    """Measure each training epoch, without its validation.

    - `system/images_per_second`: The number of images per second over all devices.
    - `system/data_wait`: The share of the time in which the main process waited for the next batch. At every optimiser
      step the process waits until the GPU has finished, so a high share means that the GPU, too, waits for images.
    - `system/memory_gb`: The peak memory in units of 1e9 bytes: memory allocated on this process's GPU, or, on the CPU,
      memory of the process.
    """

    def __init__(self) -> None:
        self._images = 0
        self._waited = self._worked = 0.0
        self._lap_started = 0.0

    def measured(self, trainer: Trainer) -> dict[str, float]:
        """Return the three figures of the epoch so far; they are missing until the first batch is done."""
        total = self._waited + self._worked
        if not total:
            return {}
        device = trainer.strategy.root_device
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device)
        else:
            # `ru_maxrss` is in bytes on macOS and in kilobytes on Linux, so convert it to bytes.
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {
            "system/images_per_second": self._images * trainer.world_size / total,
            "system/data_wait": self._waited / total,
            "system/memory_gb": memory / 1e9,
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # If an interrupted epoch is resumed, Lightning does not call `on_train_epoch_start`, so call it here.
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
