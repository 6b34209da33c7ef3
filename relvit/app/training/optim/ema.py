"""Exponential moving average (EMA) of the weights, one update per optimiser step."""

from __future__ import annotations

from collections.abc import Mapping

from timm.utils import ModelEmaV3
from torch import Tensor, nn


class WeightAverage:
    """A copy of a network whose weights are a moving average of the network's weights (timm's `ModelEmaV3`).

    After each optimiser step t = 1, 2, ... the average becomes d_t average + (1 - d_t) weights. With warm-up, d_t is
    min(decay, 1 - t^(-2/3)). Without warm-up, d_1 = 0, and then d_t = decay. So in both cases the average starts as the
    weights after the first step. Buffers are copied, never averaged.

    `ImageClassifier` updates and saves the copy, and `BaseClassifier.evaluated` returns it for evaluation.

    The copy is not a submodule, so the network's state dict, gradients and optimiser do not contain it. The copy never
    replaces the network: the training continues with the network's own weights.

    Args:
        net: The network.
        decay: The decay, in 0 <= decay < 1.
        warmup: Whether the decay grows from 0.
    """

    def __init__(self, net: nn.Module, decay: float, warmup: bool = True) -> None:
        self._ema = ModelEmaV3(net, decay=decay, use_warmup=warmup, exclude_buffers=True)
        self._ema.requires_grad_(False)

    @property
    def net(self) -> nn.Module:
        """The network with averaged weights, always in evaluation mode."""
        return self._ema.module

    def update(self, net: nn.Module, step: int) -> None:
        """Add the weights after optimiser step 1, 2, ..."""
        self._ema.update(net, step)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load the state dict of an averaged network."""
        self.net.load_state_dict(weights)
