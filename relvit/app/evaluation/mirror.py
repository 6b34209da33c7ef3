"""Test-time augmentation: average the probabilities of an image and its mirror image."""

from __future__ import annotations

from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from relvit.app.data.batches import ImageBatch, mirrored
from relvit.app.training import ImageClassifier


def average_with_mirror(module: ImageClassifier, args: tuple[ImageBatch], logits: Tensor) -> Tensor:
    """Average probabilities of images (B, C, H, W) and of their mirror images, as a forward hook of the classifier.

    The result are the logits of the mean, float32 (B, classes).
    """
    both = torch.stack((logits, module.forward(mirrored(args[0])))).float()
    return module.labels.mean_logits(both)


class MirrorAverage(Callback):
    """Let a classifier test and predict by the mean probabilities of each image and its mirror image."""

    hook: RemovableHandle | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.hook = pl_module.register_forward_hook(average_with_mirror)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._remove()

    def _remove(self) -> None:
        # The data may fail before the classifier gets its hook.
        if self.hook is not None:
            self.hook.remove()
