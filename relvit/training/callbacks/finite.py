"""No optimiser step by losses or gradients that are not finite, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from lightning import Trainer
from torch import Tensor, nn

from relvit.training.optim.sharding import whole
from relvit.utils.messages import did_you_mean

NonFinite = Literal["stop", "skip"]


class NonFiniteLossError(RuntimeError):
    """The loss or its gradient is infinite or not a number; raised before the optimiser could spoil the weights."""


class FiniteCheck:
    """Looks at the losses since the last optimiser step and at the gradients before the next one.

    All devices come to the same decision, and weights stay what they were.

    Args:
        nonfinite: 'stop' raises an error; 'skip' takes the gradients away, so that the optimiser leaves the weights.

    Raises:
        ValueError: another word.
    """

    def __init__(self, nonfinite: NonFinite) -> None:
        allowed = get_args(NonFinite)
        if nonfinite not in allowed:
            hint = did_you_mean(str(nonfinite), allowed)
            raise ValueError(f"nonfinite is {nonfinite!r}; allowed are {', '.join(map(repr, allowed))}{hint}")
        self.nonfinite = nonfinite
        self._loss: Tensor | None = None

    def note(self, loss: Tensor) -> None:
        """Take a loss into account. Nothing waits for the device here."""
        loss = loss.detach()
        # The first that is not finite, if there is one.
        self._loss = loss if self._loss is None else torch.where(self._loss.isfinite(), loss, self._loss)

    def before_step(self, trainer: Trainer, parameters: Iterable[nn.Parameter]) -> tuple[Tensor, bool]:
        """The norm of all gradients together, before they are clipped, and whether the optimiser may use them.

        Raises:
            NonFiniteLossError: it may not, with 'stop'.
        """
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]))
        loss, self._loss = self._loss, None
        fine = loss.isfinite()
        # With float16, infinite gradients are how the scaler finds its scale; it skips those steps itself.
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            fine = fine & norm.isfinite()
        if trainer.world_size > 1:
            fine = trainer.strategy.reduce(fine.int(), reduce_op="min")
        if fine:
            return norm, True
        if self.nonfinite == "stop":
            what = f"the loss is {loss.item()}" if not loss.isfinite() else f"the gradient's norm is {norm.item()}"
            if loss.isfinite() and norm.isfinite():
                what = "loss or gradient is not finite on another device"
            raise NonFiniteLossError(
                f"{what} at step {trainer.global_step + 1}, in epoch {trainer.current_epoch + 1}: stopped before the "
                "optimiser step; try a lower --model.lr, a longer --model.warmup_epochs or --trainer.gradient_clip_val "
                "1, or leave such steps out with --model.nonfinite skip"
            )
        for parameter in parameters:
            parameter.grad = None
        return norm, False
