"""Freeze the backbone, so that the first epochs of fine-tuning train the classifier alone."""

from __future__ import annotations

from torch import nn

from relvit.models import classifiers_of


class Backbone:
    """The parts of a timm model without its classifier, which can be frozen.

    Raises:
        ValueError: The model has no classifier.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.heads: tuple[nn.Module, ...] = classifiers_of(net)
        of_heads = {id(parameter) for head in self.heads for parameter in head.parameters()}
        if not of_heads:
            raise ValueError(
                f"freeze_epochs needs a model with a classifier; {type(net).__name__} has none: leave it out"
            )
        self.parameters: list[nn.Parameter] = [each for each in net.parameters() if id(each) not in of_heads]
        self.frozen: bool = False
        # Parameters that the user, or the model, has frozen stay frozen.
        self._learning: list[nn.Parameter] = []

    def set_frozen(self, frozen: bool, without_gradients: bool = True) -> None:
        """Freeze or unfreeze; frozen parts are in evaluation mode: no dropout, drop path or update of statistics.

        With `without_gradients=True`, PyTorch computes no gradients of the frozen parts, which saves time. DDP waits
        for the gradients of all parameters, so with DDP pass False, and call `drop_gradients` before each optimiser
        step.
        """
        if frozen == self.frozen:
            return
        self.frozen = frozen
        self.net.train(not frozen)
        for head in self.heads:
            head.train()
        if len(self.heads) > 1:
            # Only in training mode do timm's models with a distillation token return the logits of both heads. In
            # evaluation mode they return the mean, so both heads would learn from labels and from the teacher.
            self.net.training = True
        if frozen:
            self._learning = [parameter for parameter in self.parameters if parameter.requires_grad]
        for parameter in self._learning:
            parameter.requires_grad_(not (frozen and without_gradients))

    def drop_gradients(self) -> None:
        """Remove the gradients, so that the optimiser does not change these parameters."""
        for parameter in self.parameters:
            parameter.grad = None
