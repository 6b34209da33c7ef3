"""Additional losses in `TrainingOutput`: weights, warm-up, and checks; `loss.py` has the classification loss."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from typing import Any

from lightning import Trainer
from torch import nn

from relvit.app.training.optim.schedule import steps_of


def check_losses(
    given: Mapping[str, Any], parameters: Mapping[str, Parameter], net: nn.Module, models: Mapping[str, str]
) -> None:
    """Refuse options of losses that a network does not return.

    Args:
        given: The arguments of `ImageClassifier`.
        parameters: The parameters of `ImageClassifier`, which have the defaults.
        net: The network.
        models: Maps the name of each loss that only some models return to a description of these models.

    Raises:
        ValueError: An option is given for a loss that the network does not return.
    """
    for name in models.keys() - set(training_losses(net)):
        for option in loss_options(name):
            if given[option] != parameters[option].default:
                raise ValueError(f"{option} {given[option]} has no effect without {models[name]}: give both or neither")


def loss_options(name: str) -> tuple[str, str]:
    """Return the options of a loss: its weight, and the number of epochs in which this weight rises."""
    return f"{name}_weight", f"{name}_warmup_epochs"


def training_losses(net: nn.Module) -> tuple[str, ...]:
    """Return the names of the additional losses that a network returns."""
    return getattr(net, "training_losses", ())


def loss_weight(given: Mapping[str, Any], trainer: Trainer, name: str) -> float:
    """Compute the weight of a loss at a trainer's optimiser step: it rises linearly, as the learning rate does."""
    weight, option = loss_options(name)
    warmup = steps_of(trainer, option, given[option])
    return given[weight] * min(1.0, (trainer.global_step + 1) / (warmup + 1))
