"""Metrics of an epoch on all devices (torchmetrics): loss and accuracy or mean average precision, logged and resumed.

The metrics of each class, as a test reports them, are in `class_metrics.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed
from lightning import LightningModule, Trainer
from torch import Tensor
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric

from relvit.app.data.loading.eval_shards import images_without_copies
from relvit.app.training.checkpoints.exact_resume import is_last_of_epoch
from relvit.app.training.labels import Labels

# A checkpoint holds the metrics of an unfinished epoch under this key.
METRICS_KEY = "train_metrics"

States = dict[str, dict[str, Any]]


def epoch_metrics(labels: Labels, num_classes: int, prefix: str = "", mixed: bool = False) -> MetricCollection:
    """Create the metrics of an epoch: the mean loss 'loss', and the metrics of `Labels.metrics`."""
    training = prefix == "train/"
    # By default a `MeanMetric` leaves NaN out. A training needs this default for the steps that the training skips
    # (`nonfinite`), and counts infinite losses as NaN. But in an evaluation one loss of NaN must make the mean NaN, so
    # there `nan_strategy` replaces NaN by NaN.
    loss = MeanMetric() if training else MeanMetric(nan_strategy=math.nan)
    metrics = {"loss": loss, **labels.metrics(num_classes, training, mixed)}
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)


def count_batch(metrics: MetricCollection, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Add a batch, which may be empty: its mean loss, logits (B, num_classes), and labels (B,) or (B, num_classes)."""
    for name, metric in metrics.items(keep_base=True):
        if name == "loss" and len(labels):
            metric.update(loss.detach(), weight=len(labels))
        elif name == "scores" or (name != "loss" and len(labels)):
            metric.update(logits.detach(), labels)


def computed(metrics: MetricCollection) -> dict[str, Tensor]:
    """Compute metrics of a training, in every process, except metrics without a value.

    The ponder cost has no value in an epoch with a frozen backbone, nor has a metric that the training step of a
    subclass does not update. All processes leave out the same metrics.
    """
    return {name: metric.compute() for name, metric in metrics.items() if metric.update_called}


def current_lr(trainer: Trainer) -> float:
    """Return the learning rate of the last layer, the highest of all groups without a `position_lr_scale`.

    If relative positions alone are trained, return the highest rate of all groups.
    """
    groups = trainer.optimizers[0].param_groups
    return max(group["lr"] for group in [each for each in groups if "position_lr_scale" not in each] or groups)


class EpochMetrics(LightningModule):
    """A LightningModule whose metrics count every image once on any number of devices.

    All processes compute a metric at the same point, and log the result as a plain number. If a process logged the
    metric object itself, Lightning would compute the metric only when something reads it. A progress bar reads metrics
    on the main process alone, which would wait for the other processes for ever.

    Attributes:
        labels: The labels of the images, one per image or several.
        has_own_steps: Whether a subclass overrides relvit's steps of validation or test.
        train_metrics: The metrics of the training, on augmented images, see `epoch_metrics`.
        val_metrics: The metrics of the validation.
        test_metrics: The metrics of the test.
        step_metrics: Means and sums over the optimiser steps of an epoch.
        evaluated_images: The number of images of the last validation or test on all devices, without unreadable ones.
    """

    labels: Labels
    has_own_steps: bool = False
    train_metrics: MetricCollection
    val_metrics: MetricCollection
    test_metrics: MetricCollection
    evaluated_images: int = 0
    # This counts the images that this process has seen in the validation or test, copies included.
    _seen: int = 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EpochMetrics:
        """Convert metrics with the module, but keep their sums in float32 where the weights become two-byte numbers."""
        super()._apply(fn, recurse)
        for metric in self.modules():
            if isinstance(metric, Metric) and metric.dtype in (torch.float16, torch.bfloat16):
                metric._apply(lambda state: state.float() if state.is_floating_point() else state)
        return self

    def create_metrics(self, labels: Labels, num_classes: int, mixed: bool, of_steps: dict[str, Metric]) -> None:
        """Create the metrics; `of_steps` are metrics of optimiser steps that only some trainings have."""
        self.labels = labels
        self.train_metrics, self.val_metrics, self.test_metrics = (
            epoch_metrics(labels, num_classes, f"{split}/", mixed and split == "train")
            for split in ("train", "val", "test")
        )
        of_steps = {"grad_norm": MeanMetric(), **of_steps}
        self.step_metrics: MetricCollection = MetricCollection(of_steps, compute_groups=False, prefix="train/")
        self._images: SumMetric = SumMetric()
        # These are the metrics at the last optimiser step. Checkpoints hold these metrics, because a training resumes
        # at this step.
        self._metrics_at_step: States = {}

    @property
    def thresholds(self) -> list[float] | None:
        """The lowest probability at which an image has a class, for each class; None if images have one label."""
        return self.labels.thresholds

    def log_running(self) -> None:
        """Show loss and accuracy of the epoch so far, over the images of this process, in the progress bar."""
        # torchmetrics gives each metric object a `compute` that waits for the other processes. Call `compute` of the
        # class instead, which does not wait.
        values = {name: type(metric).compute(metric) for name, metric in self.train_metrics.items(keep_base=True)}
        shown = {"loss": "loss", "acc1": "acc", "acc1_mixed": "acc"}
        values = {shown[name]: value for name, value in values.items() if name in shown}
        self.log_dict(values, prog_bar=True, logger=False)

    def keep_step_metrics(self) -> None:
        """Copy the epoch's metrics after an optimiser step, for checkpoints."""
        self._metrics_at_step = _copy_states(self.train_metrics) | _copy_states(self.step_metrics)

    def metrics_to_save(self, within_epoch: bool) -> list[States]:
        """Gather the metrics at the last optimiser step from all processes; a finished epoch needs none."""
        return _gather_states(self._metrics_at_step if within_epoch else {})

    def restore_metrics(self, stored: list[States]) -> None:
        """Resume with the metrics of a checkpoint, in each process with its own."""
        # Ignore the stored metrics if the number of processes has changed, because the training then begins an epoch.
        self._metrics_at_step = stored[self.global_rank] if len(stored) == self.trainer.world_size else {}
        for metrics in (self.train_metrics, self.step_metrics):
            metrics.reset()
            _restore_states(metrics, self._metrics_at_step)

    def on_train_epoch_start(self) -> None:
        self.train_metrics.reset()
        self.step_metrics.reset()

    def count_evaluated(self, metrics: MetricCollection, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch of a validation or test, see `count_batch`."""
        count_batch(metrics, loss, logits, labels)
        self._images.update(len(labels))

    def without_copies(self, count: int) -> int:
        """Return how many of the next images of a validation or test are no copies, see `images_without_copies`."""
        loader = self.trainer.test_dataloaders if self.trainer.testing else self.trainer.val_dataloaders
        known, begin = images_without_copies(loader), self._seen
        self._seen += count
        return count if known is None else max(0, min(count, known - begin))

    def on_validation_epoch_start(self) -> None:
        self._seen = 0
        self._images.reset()
        self.val_metrics.reset()
        self.labels.choose_thresholds(self.val_metrics, choose=self._is_fitting)

    def on_test_epoch_start(self) -> None:
        self._seen = 0
        self._images.reset()
        self.test_metrics.reset()
        self.labels.choose_thresholds(self.test_metrics, choose=False)

    # Log the metrics after the last batch of an epoch, because callbacks read them, and at the end of the epoch
    # Lightning calls callbacks before the module. Log the metrics again at the end of the epoch: if a training stops
    # early or the data have no length, no batch counts as the last.

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer = self.trainer
        steps_done = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        if steps_done or is_last_of_epoch(trainer, batch_idx):
            self._log_train()

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx + 1 == self.trainer.num_val_batches[dataloader_idx]:
            self._log_evaluated(self.val_metrics)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx + 1 == self.trainer.num_test_batches[dataloader_idx]:
            self._log_evaluated(self.test_metrics)

    def on_train_epoch_end(self) -> None:
        self._log_train()

    def on_validation_epoch_end(self) -> None:
        self._log_evaluated(self.val_metrics)
        if self._is_fitting and not self.trainer.sanity_checking:
            # A subclass may count no images here, so ask the data, too.
            if not self.evaluated_images and getattr(self.trainer.datamodule, "unreadable", {}).get("val"):
                raise ValueError("none of the images of val could be read: relvit check-data says why")
            self.labels = self.labels.chosen(self.val_metrics)

    def on_test_epoch_end(self) -> None:
        self._log_evaluated(self.test_metrics)

    @property
    def _is_fitting(self) -> bool:
        try:
            return self.trainer.state.fn == "fit"
        # Lightning raises this error if there is no trainer, for example in a classifier that was only loaded: no
        # training runs.
        except RuntimeError:
            return False

    def _log_train(self) -> None:
        self._log(computed(self.train_metrics) | {"lr": current_lr(self.trainer)}, prog_bar=False)

    def _log_evaluated(self, metrics: MetricCollection) -> None:
        # The steps of a subclass may log metrics of their own, under the same names, and count no batch here. With
        # relvit's steps a process without a batch must compute, too, because the other processes wait for it.
        if self._images.update_called or not self.has_own_steps:
            self._log(metrics.compute())
            self.evaluated_images = int(self._images.compute())

    def _log(self, values: dict[str, Any], prog_bar: bool = True) -> None:
        # The values already include all processes. With both `sync_dist` and `rank_zero_only`, Lightning neither
        # reduces them again nor warns that they are not reduced.
        options = {"sync_dist": True, "rank_zero_only": True, "batch_size": 1, "add_dataloader_idx": False}
        self.log_dict(values, on_step=False, on_epoch=True, prog_bar=prog_bar, **options)


def _copy_states(metrics: MetricCollection) -> States:
    """Copy the states of metrics, which are sums; Lightning does not store them within an epoch."""
    return {
        name: {"updates": metric.update_count, **{key: value.clone() for key, value in metric.metric_state.items()}}
        for name, metric in metrics.items(keep_base=True)
    }


def _gather_states(states: States) -> list[States]:
    """Gather the states of all processes on the CPU; every process has to call this function."""
    own = {
        name: {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
        for name, state in states.items()
    }
    if not torch.distributed.is_initialized():
        return [own]
    gathered: list[States] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, own)
    return gathered


def _restore_states(metrics: MetricCollection, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Load states into metrics."""
    for name, metric in metrics.items(keep_base=True):
        if name not in states:
            continue
        for key, value in states[name].items():
            if key == "updates":
                metric._update_count = value
            else:
                setattr(metric, key, value.to(metric.device))
