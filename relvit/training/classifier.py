"""The Lightning module that trains, evaluates and predicts with any timm or relvit classifier."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningModule
from timm.optim import create_optimizer_v2
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from relvit.models import build_model
from relvit.training.schedule import warmup_cosine


class NonFiniteLossError(RuntimeError):
    """The loss is infinite or not a number; raised before the optimiser could spoil the weights."""


class ImageClassifier(LightningModule):
    """Image classification with cross-entropy, AdamW and a warm-up + cosine learning rate per optimiser step.

    Args:
        model: name of a relvit or timm model.
        num_classes: number of classes.
        in_chans: channels of the images.
        img_size: image size that the model is built for; evaluation may use others.
        class_names: names of the classes in order.
        model_kwargs: further arguments of the model, checked against its signature.
        retrofit: arguments of `relvit.retrofit`, which gives a timm model relative positions; {} for its defaults, None
            to leave the model as it is.
        lr: peak learning rate.
        weight_decay: AdamW's decay; biases, norms and position tables take none.
        warmup_epochs: length of the linear warm-up in epochs, fractions allowed.
        min_lr: learning rate at the end.
        label_smoothing: share of the target that is spread over all classes (Szegedy et al. 2016, arXiv 1512.00567).

    Raises:
        ValueError: an unknown model or model argument, class names that do not match `num_classes`, rates out of range.
    """

    def __init__(
        self,
        model: str = "relvit_small",
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        class_names: list[str] | None = None,
        model_kwargs: dict[str, Any] | None = None,
        retrofit: dict[str, Any] | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        warmup_epochs: float = 5.0,
        min_lr: float = 1e-5,
        label_smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        if class_names is not None and len(class_names) != num_classes:
            raise ValueError(f"class_names holds {len(class_names)} names, num_classes is {num_classes}")
        if not 0 <= min_lr <= lr:
            raise ValueError(f"need 0 <= min_lr <= lr, got min_lr {min_lr} and lr {lr}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in 0 <= x < 1, got {label_smoothing}")
        self.save_hyperparameters()
        self.net = build_model(model, num_classes, in_chans, img_size, model_kwargs, retrofit)
        # torchmetrics objects count every sample of every process once, whatever the batch sizes.
        accuracies = {
            f"acc{k}": MulticlassAccuracy(num_classes, top_k=k, average="micro") for k in (1, 5) if k <= num_classes
        }
        metrics = MetricCollection({"loss": MeanMetric(), **accuracies}, compute_groups=False)
        self.train_metrics, self.val_metrics, self.test_metrics = (
            metrics.clone(f"{stage}/") for stage in ("train", "val", "test")
        )

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, in_chans, height, width) -> logits (B, num_classes)."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self.net(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.hparams.label_smoothing)
        if not torch.isfinite(loss):
            raise NonFiniteLossError(
                f"the loss is {loss.item()} at step {self.global_step} of epoch {self.current_epoch}: "
                "stopped before the optimiser step; try a lower --model.lr, a longer --model.warmup_epochs or "
                "--trainer.gradient_clip_val 1"
            )
        self._count(self.train_metrics, loss, logits, labels)
        accuracy = (logits.detach().argmax(-1) == labels).float().mean()
        self.log_dict({"loss": loss, "acc": accuracy}, prog_bar=True, logger=False)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(self.val_metrics, batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(self.test_metrics, batch)

    def predict_step(self, batch: tuple[Tensor, list[str]], batch_idx: int) -> dict[str, Any]:
        """Names of the images, (B, num_classes) probabilities."""
        images, names = batch
        return {"names": list(names), "probabilities": self.net(images).float().softmax(-1)}

    def configure_optimizers(self) -> dict[str, Any]:
        total = self.trainer.estimated_stepping_batches
        if not math.isfinite(total):
            raise ValueError("the cosine needs an end: give --trainer.max_epochs or --trainer.max_steps")
        per_epoch = math.ceil(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches)
        warmup = min(round(self.hparams.warmup_epochs * per_epoch), int(total) - 1)
        optimizer = create_optimizer_v2(
            self.net, opt="adamw", lr=self.hparams.lr, weight_decay=self.hparams.weight_decay
        )
        floor = self.hparams.min_lr / self.hparams.lr if self.hparams.lr else 0.0
        factor = partial(warmup_cosine, total=int(total), warmup=warmup, floor=floor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"},
        }

    def _evaluate(self, metrics: MetricCollection, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self.net(images)
        self._count(metrics, F.cross_entropy(logits.float(), labels), logits, labels)

    def _count(self, metrics: MetricCollection, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        for name, metric in metrics.items(keep_base=True):
            if name == "loss":
                metric.update(loss.detach(), weight=len(labels))
            else:
                metric.update(logits.detach(), labels)
        # The progress bar shows loss and accuracy of the batch while training, of the whole set in evaluation.
        show = metrics is not self.train_metrics
        self.log_dict(dict(metrics.items()), on_step=False, on_epoch=True, prog_bar=show, batch_size=len(labels))
