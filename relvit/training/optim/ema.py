"""An exponential moving average of the weights, beside them."""

from __future__ import annotations

from collections.abc import Mapping

from timm.utils import ModelEmaV3
from torch import Tensor, nn

from relvit.training.optim.sharding import load_whole


class WeightAverage:
    """A copy of a network whose weights are the moving average of the network's, one update per optimiser step.

    After step t = 1, 2, ...: average = d_t average + (1 - d_t) weights. With the warm-up d_t = min(decay,
    1 - t^(-2/3)), without it d_t = decay, but d_1 = 0: the average starts as the weights after the first step. Buffers
    are copied, never averaged: indices are no weights.

    It is no submodule of anything, so that the network's state dict, gradients and devices have nothing to do with it;
    the two never change places.

    Args:
        net: the network.
        decay: d, in 0 <= d < 1.
        warmup: let the decay grow from 0.
    """

    def __init__(self, net: nn.Module, decay: float, warmup: bool = True) -> None:
        self._ema = ModelEmaV3(net, decay=decay, use_warmup=warmup, exclude_buffers=True)
        self._ema.requires_grad_(False)

    @property
    def net(self) -> nn.Module:
        """The network with averaged weights, always in evaluation mode."""
        return self._ema.module

    def decay(self, step: int) -> float:
        """d_t of step t."""
        return self._ema.get_decay(step)

    def update(self, net: nn.Module, step: int) -> None:
        """Take in the weights after optimiser step 1, 2, ..."""
        self._ema.update(net, step)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from the state dict of an averaged network, with whole weights where the network has shards."""
        load_whole(self.net, weights)
