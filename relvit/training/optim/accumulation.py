"""Gradients that are accumulated over several batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning import Trainer
from torch import nn


@torch.no_grad()
def average_gradients(trainer: Trainer, parameters: Iterable[nn.Parameter]) -> None:
    """Make the gradients at an optimiser step the mean over the batches that were accumulated for it.

    Lightning divides every loss by `accumulate_grad_batches`, also where an epoch has fewer batches left for its last
    step. It is put right here and not in the loss, as only then the number of those batches is known for any data.
    """
    planned = trainer.accumulate_grad_batches
    accumulated = trainer.fit_loop.epoch_loop.batch_idx % planned + 1
    if accumulated < planned:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= planned / accumulated
