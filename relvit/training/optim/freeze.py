"""Freezing of the backbone: for the first epochs of fine-tuning, the classifier alone is trained."""

from __future__ import annotations

from torch import nn


class Backbone:
    """All parts of a timm model but its classifier, which can be frozen."""

    def __init__(self, net: nn.Module) -> None:
        heads = net.get_classifier() if hasattr(net, "get_classifier") else ()
        self.net = net
        self.heads: tuple[nn.Module, ...] = tuple(heads) if isinstance(heads, tuple) else (heads,)
        of_heads = {id(parameter) for head in self.heads for parameter in head.parameters()}
        if not of_heads:
            raise ValueError(f"freeze_epochs needs a model with a classifier; {type(net).__name__} has none")
        self.parameters: list[nn.Parameter] = [
            parameter for parameter in net.parameters() if id(parameter) not in of_heads
        ]
        self.frozen: bool = False

    def set_frozen(self, frozen: bool, without_gradients: bool = True) -> None:
        """Freeze, in evaluation mode, which also stops dropout, drop path and running statistics, or unfreeze.

        Args:
            frozen: Whether to freeze; nothing changes where that is done already.
            without_gradients: Compute no gradients, which saves time. DDP needs those that it has prepared for: give
                False, and call `drop_gradients` before each optimiser step.
        """
        if frozen == self.frozen:
            return
        self.frozen = frozen
        self.net.train(not frozen)
        for head in self.heads:
            head.train()
        for parameter in self.parameters:
            parameter.requires_grad_(not (frozen and without_gradients))

    def drop_gradients(self) -> None:
        """Remove the gradients, so that the optimiser leaves these parameters."""
        for parameter in self.parameters:
            parameter.grad = None
