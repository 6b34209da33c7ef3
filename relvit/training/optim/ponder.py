"""Ponder cost: what a model whose patches halt adds to the training loss, with a warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning import Trainer
from torch import nn

from relvit.families.universal import UniversalVisionTransformer
from relvit.training.optim.schedule import steps_of

# Of the arguments of `ImageClassifier`.
DEFAULTS = {"ponder_weight": 0.01, "ponder_warmup_epochs": 5.0}


def halts(net: nn.Module) -> bool:
    """Return whether the patches of a network halt, so that there is a ponder cost."""
    return isinstance(net, UniversalVisionTransformer) and net.halting is not None


def check_ponder(given: Mapping[str, Any], net: nn.Module) -> None:
    """Raise a ValueError for options without effect on this network."""
    for name, default in DEFAULTS.items():
        if given[name] != default and not halts(net):
            raise ValueError(
                f"{name} {given[name]} has no effect without a model that halts: relvit_universal_* with "
                "model_kwargs.halting act"
            )


def ponder_weight(given: Mapping[str, Any], trainer: Trainer) -> float:
    """Compute the weight of the ponder cost at a trainer's optimiser step: a linear rise, as of the learning rate."""
    warmup = steps_of(trainer, "ponder_warmup_epochs", given["ponder_warmup_epochs"])
    return given["ponder_weight"] * min(1.0, (trainer.global_step + 1) / (warmup + 1))
