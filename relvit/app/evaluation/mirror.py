"""Test-time augmentation in the Trainer: switch on `Answering.mirror`; `Answering.logits` computes the average."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer


class MirrorAverage(Callback):
    """Let a classifier test and predict by the mean probabilities of each image and its mirror image."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.mirror = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.mirror = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.mirror = False
