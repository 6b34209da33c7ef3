"""Loss and accuracy over a data set, on any number of devices."""

from __future__ import annotations

from torch import Tensor
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy


def class_metrics(num_classes: int, prefix: str, mixed: bool = False) -> MetricCollection:
    """Mean loss 'loss', accuracy 'acc1' and, with five classes or more, top-5 accuracy 'acc5'.

    torchmetrics objects count every sample of every process once, whatever the batch sizes.

    Args:
        num_classes: number of classes.
        prefix: before each name, such as 'val/'.
        mixed: call the accuracies 'acc1_mixed' and 'acc5_mixed': on mixed images, where the larger share counts as the
            class, they say something else.
    """
    metrics: dict[str, Metric] = {"loss": MeanMetric()}
    for k in (1, 5):
        if k <= num_classes:
            metrics[f"acc{k}_mixed" if mixed else f"acc{k}"] = MulticlassAccuracy(num_classes, top_k=k, average="micro")
    return MetricCollection(metrics, prefix=prefix, compute_groups=False)


def count_batch(metrics: MetricCollection, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Take in a batch: its mean loss, logits (B, num_classes), labels (B,)."""
    for name, metric in metrics.items(keep_base=True):
        if name == "loss":
            metric.update(loss.detach(), weight=len(labels))
        else:
            metric.update(logits.detach(), labels)


def running_values(metrics: MetricCollection) -> dict[str, Tensor]:
    """Values over the batches of this process so far, as 'loss', 'acc1' ...: no process waits for another.

    By the class's `compute`; that of the object synchronises, and remembers what it found.
    """
    values = {name: type(metric).compute(metric) for name, metric in metrics.items(keep_base=True)}
    return {name.removesuffix("_mixed"): value for name, value in values.items()}
