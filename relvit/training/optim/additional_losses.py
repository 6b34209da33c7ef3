"""Weights and warm-up of the additional losses in `TrainingOutput`; the classification loss is in `loss.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning import Trainer
from torch import nn

from relvit.training.optim.schedule import steps_of

# The options of the ponder cost, the only additional loss, and their defaults in `ImageClassifier`.
PONDER_DEFAULTS: dict[str, Any] = {"ponder_weight": 0.01, "ponder_warmup_epochs": 5.0}


def check_losses(given: Mapping[str, Any], net: nn.Module) -> None:
    """Refuse options of the ponder cost where a network does not return this loss.

    Raises:
        ValueError: There is such an option.
    """
    for option, default in PONDER_DEFAULTS.items():
        if given[option] != default and "ponder" not in training_losses(net):
            raise ValueError(
                f"{option} {given[option]} has no effect without a model that halts: relvit_universal_* with "
                "model_kwargs.halting act"
            )


def training_losses(net: nn.Module) -> tuple[str, ...]:
    """Return the names of the additional losses that a network returns."""
    return getattr(net, "training_losses", ())


def loss_weight(given: Mapping[str, Any], trainer: Trainer, name: str) -> float:
    """Compute the weight of a loss at a trainer's optimiser step: it rises linearly, as the learning rate does."""
    option = f"{name}_warmup_epochs"
    warmup = steps_of(trainer, option, given[option])
    return given[f"{name}_weight"] * min(1.0, (trainer.global_step + 1) / (warmup + 1))
