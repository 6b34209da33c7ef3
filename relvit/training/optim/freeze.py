"""Training the classifier alone for a while, as the first part of fine-tuning."""

from __future__ import annotations

from torch import nn


class Backbone:
    """Everything of a timm model but its classifier, which can be held still.

    Args:
        net: a timm model.

    Raises:
        ValueError: the model has no classifier with parameters.
    """

    def __init__(self, net: nn.Module) -> None:
        heads = net.get_classifier() if hasattr(net, "get_classifier") else ()
        self.net = net
        self.heads: tuple[nn.Module, ...] = tuple(heads) if isinstance(heads, tuple) else (heads,)
        trained = {id(parameter) for head in self.heads for parameter in head.parameters()}
        if not trained:
            raise ValueError(f"freeze_epochs needs a model with a classifier; {type(net).__name__} has none")
        self.parameters = [parameter for parameter in net.parameters() if id(parameter) not in trained]
        self.frozen = False

    def freeze(self, without_gradients: bool) -> None:
        """Hold still: evaluation mode, so that dropout, drop path and running statistics rest as well.

        Args:
            without_gradients: compute none, which saves time. DDP cannot do without those that it has prepared for;
                call `drop_gradients` before each optimiser step then.
        """
        self.frozen = True
        self.net.eval()
        for head in self.heads:
            head.train()
        for parameter in self.parameters:
            parameter.requires_grad_(not without_gradients)

    def drop_gradients(self) -> None:
        """Keep an optimiser from moving these parameters: it passes over those without gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def unfreeze(self) -> None:
        """Train as the rest."""
        self.frozen = False
        self.net.train()
        for parameter in self.parameters:
            parameter.requires_grad_(True)
