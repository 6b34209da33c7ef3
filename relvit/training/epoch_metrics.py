"""Metrics of an epoch, computed where every process comes past, and what is logged of them."""

from __future__ import annotations

from typing import Any

from lightning import LightningModule, Trainer
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from relvit.training.class_metrics import class_metrics, running_values


def current_lr(trainer: Trainer) -> float:
    """The learning rate of the last layer; those of the layers below may be lower."""
    return max(group["lr"] for group in trainer.optimizers[0].param_groups)


class EpochMetrics(LightningModule):
    """A LightningModule whose metrics are exact on any number of processes and are logged as plain numbers.

    Lightning computes a torchmetrics object that was logged, and reduces a value that was logged with `sync_dist`, when
    somebody reads it for the first time. A progress bar reads on the main process alone, which then waits for processes
    that are elsewhere. Here every process computes at the same place, and what is logged needs no reduction any more.

    Attributes:
        train_metrics: see `class_metrics`; of the images as they are trained on.
        val_metrics: the same of validation.
        test_metrics: the same of testing.
        step_metrics: means and sums over the optimiser steps of an epoch.
    """

    def create_metrics(self, num_classes: int, mixed: bool, skipped_steps: bool) -> None:
        """Create the metrics: with `mixed` images, see `class_metrics`, and counting the `skipped_steps` or not."""
        self.val_metrics, self.test_metrics = (class_metrics(num_classes, prefix) for prefix in ("val/", "test/"))
        self.train_metrics = class_metrics(num_classes, "train/", mixed=mixed)
        of_steps = {"grad_norm": MeanMetric()} | ({"skipped_steps": SumMetric()} if skipped_steps else {})
        self.step_metrics = MetricCollection(of_steps, compute_groups=False, prefix="train/")

    def log_running(self) -> None:
        """Show loss and accuracy of the epoch so far, over the images of this process, in the progress bar."""
        values = running_values(self.train_metrics)
        self.log_dict({"loss": values["loss"], "acc": values["acc1"]}, prog_bar=True, logger=False)

    def on_train_epoch_start(self) -> None:
        """Lightning resets the metrics of an epoch only if there were batches since the training went on."""
        self.train_metrics.reset()
        self.step_metrics.reset()

    # At the end of an epoch callbacks come before the module: for their sake metrics are logged with the last batch,
    # and once more at the end, as it may turn out later which batch was the last: where training stops early, or where
    # data have no length.

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.fit_loop.epoch_loop._is_training_done:
            self._log_train()

    def on_train_epoch_end(self) -> None:
        self._log_train()

    def on_validation_epoch_start(self) -> None:
        self.val_metrics.reset()

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx + 1 == self.trainer.num_val_batches[dataloader_idx]:
            self._log_computed(self.val_metrics)

    def on_validation_epoch_end(self) -> None:
        self._log_computed(self.val_metrics)

    def on_test_epoch_start(self) -> None:
        self.test_metrics.reset()

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx + 1 == self.trainer.num_test_batches[dataloader_idx]:
            self._log_computed(self.test_metrics)

    def on_test_epoch_end(self) -> None:
        self._log_computed(self.test_metrics)

    def _log_train(self) -> None:
        self._log_values(self.train_metrics.compute() | {"lr": current_lr(self.trainer)}, prog_bar=False)

    def _log_computed(self, metrics: MetricCollection) -> None:
        # The second time it is what was computed before.
        self._log_values(metrics.compute(), prog_bar=True)

    def _log_values(self, values: dict[str, Any], prog_bar: bool) -> None:
        # Together, the last two say that the values are the same on all processes: Lightning neither reduces them nor
        # warns that it does not.
        self.log_dict(
            values,
            on_step=False,
            on_epoch=True,
            prog_bar=prog_bar,
            batch_size=1,
            add_dataloader_idx=False,
            sync_dist=True,
            rank_zero_only=True,
        )
