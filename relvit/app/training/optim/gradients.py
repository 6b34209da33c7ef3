"""Gradient checkpointing, and gradients before an optimiser step: NaN, infinity, the average of accumulated batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from lightning import Trainer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

NonFinite = Literal["stop", "skip"]


class NonFiniteLossError(RuntimeError):
    """The loss or its gradient is infinite or not a number; raised before the optimiser could spoil the weights."""


class FiniteCheck:
    """Check the losses since the last optimiser step and the gradients, with the same decision on all devices.

    If a loss or gradient is not finite, 'stop' raises an error, and 'skip' removes the gradients, so that weights do
    not change. A skipped step counts as a step: schedule and averaged weights go on. In both cases batch norm gets back
    its statistics from before the step, because a forward pass that is not finite would make them NaN for ever.
    """

    def __init__(self, nonfinite: NonFinite) -> None:
        self.nonfinite = nonfinite
        self._loss: Tensor | None = None
        self._statistics: list[Tensor] = []
        self._kept: list[Tensor] = []

    def begin(self, net: nn.Module) -> None:
        """Keep the statistics of batch norm before the first step."""
        norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
        self._statistics = [buffer for norm in norms for buffer in norm.buffers()]
        self._kept = [buffer.clone() for buffer in self._statistics]

    def note(self, loss: Tensor) -> None:
        """Remember the first loss since the last optimiser step that is not finite."""
        # Use `torch.where`, because an `if` would make the CPU wait for the GPU.
        loss = loss.detach()
        self._loss = loss if self._loss is None else torch.where(self._loss.isfinite(), loss, self._loss)

    def forget(self) -> None:
        """Forget the losses since the last optimiser step."""
        self._loss = None

    def before_step(self, trainer: Trainer, parameters: Iterable[nn.Parameter]) -> tuple[Tensor, bool]:
        """Return the norm of all gradients before clipping, and whether the optimiser may use the gradients.

        Raises:
            NonFiniteLossError: A loss or gradient is not finite, and `nonfinite` is 'stop'.
        """
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        # With precision bf16-true or 16-true the gradients have two bytes each. A norm in such numbers would be rounded
        # or overflow, so convert the gradients to float32.
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad.to(torch.promote_types(parameter.grad.dtype, torch.float32)) for parameter in parameters]
        )
        # There is no loss if the training step of a subclass has left out all batches since the last step.
        loss, self._loss = torch.zeros_like(norm) if self._loss is None else self._loss, None
        finite = loss.isfinite()
        # With float16, infinite gradients are normal: the gradient scaler then lowers its scale, and skips the step
        # itself. So the loss alone decides here if there is a scaler.
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            finite = finite & norm.isfinite()
        if trainer.world_size > 1:
            finite = trainer.strategy.reduce(finite.int(), reduce_op="min")
        pairs = (self._kept, self._statistics) if finite else (self._statistics, self._kept)
        for target, source in zip(*pairs, strict=True):
            target.copy_(source)
        if finite:
            return norm, bool(norm.isfinite())
        if self.nonfinite == "skip":
            for parameter in parameters:
                parameter.grad = None
            return norm, False
        if not loss.isfinite():
            reason = f"the loss is {loss.item()}"
        elif not norm.isfinite():
            reason = f"the gradient's norm is {norm.item()}"
        else:
            reason = "loss or gradient is not finite on another device"
        raise NonFiniteLossError(
            f"{reason} at step {trainer.global_step + 1}, in epoch {trainer.current_epoch + 1}: stopped before the "
            "optimiser step; try a lower --model.lr, a longer --model.warmup_epochs or --trainer.gradient_clip_val 1, "
            "or leave such steps out with --model.nonfinite skip"
        )


@torch.no_grad()
def average_accumulated(trainer: Trainer, parameters: Iterable[nn.Parameter]) -> None:
    """Make the gradients at an optimiser step the mean over the batches that were accumulated for this step.

    Lightning divides every loss by `accumulate_grad_batches`, but the last step of an epoch may have fewer batches, so
    that its gradients are too small. At that step, when the number is known, this function corrects the gradients.
    """
    planned = trainer.accumulate_grad_batches
    accumulated = trainer.fit_loop.epoch_loop.batch_idx % planned + 1
    if accumulated < planned:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad *= planned / accumulated


def recompute_blocks(net: nn.Module) -> None:
    """Turn on gradient checkpointing: backward computes each block again instead of keeping its activations.

    Raises:
        ValueError: The model has no gradient checkpointing.
    """
    try:
        net.set_grad_checkpointing()
    except (AssertionError, AttributeError) as error:
        # Models of timm without gradient checkpointing raise an AssertionError.
        raise ValueError(
            f"{type(net).__name__} has no gradient checkpointing: leave out grad_checkpointing, or take another model"
        ) from error
