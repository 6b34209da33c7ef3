"""Sinusoids of row, column and step: the position and time signals of the Universal Transformer, in 2D."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relvit.layers.mixer import Leaf
from relvit.ops import Grid
from relvit.ops.grid import batched_coords
from relvit.utils.constants import KeepConstants


# Because of `wrap`, symbolic tracing (torch.fx) keeps a call of this function as one node. Tracing into the function
# would fail in PyTorch 2.8, where `arange` takes no traced dtype.
@torch.fx.wrap
def sinusoids(position: Tensor, width: int, gain: Tensor) -> Tensor:
    """Compute sines, then cosines, of positions (...) at geometric wavelengths: (..., width); `width` is even.

    The result has the dtype of `gain`; the computation is in float32 at least.
    """
    half, wide = width // 2, torch.promote_types(gain.dtype, torch.float32)
    steps = torch.arange(half, dtype=wide, device=position.device)
    angle = position.to(wide)[..., None] * torch.exp(steps * (-math.log(10000.0) / half))
    return torch.cat((angle.sin(), angle.cos()), dim=-1).to(gain.dtype)


class PositionStepSignals(KeepConstants, Leaf):
    """Sinusoids of row, column and step number that are added to every token at every step.

    Source: equations 6 and 7 of the Universal Transformer (Dehghani et al. 2018, arXiv 1807.03819), where each channel
    has a sinusoid of the position plus a sinusoid of the step. In 2D the first half of the channels has the row's
    sinusoids and the second half the column's sinusoids, since a sum of row and column sinusoids could not distinguish
    rows from columns. The signals exist for every grid and every number of steps. Prefix tokens have no position and
    get only the signal of the step.

    The signals are added to the states again at every step, and pre-norm blocks do not normalise the states that they
    pass on, so the added signals accumulate. A learned gain per channel therefore keeps the signals small.

    Examples:
        >>> signals = PositionStepSignals(192)
        >>> signals(make_grid(4, 6, prefix=1)).shape, signals.step(1).shape
        (torch.Size([1, 25, 192]), torch.Size([192]))

    Args:
        dim: width of the tokens, a multiple of 4.
        gain_init: initial gain of all channels.

    Raises:
        ValueError: `dim` is not a multiple of 4.
    """

    def __init__(
        self,
        dim: int,
        gain_init: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim % 4:
            raise ValueError(
                f"dim (a model's embed_dim) must be a multiple of 4, got {dim}: it is divided among sines and "
                "cosines of rows and columns"
            )
        self.dim = dim
        self.gain_init = gain_init
        self.gain: nn.Parameter = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise the gain."""
        nn.init.constant_(self.gain, self.gain_init)

    def forward(self, grid: Grid) -> Tensor:
        """Compute the signals of the positions of all tokens, zero for prefix tokens: (1 or B, N, dim)."""
        signals = sinusoids(batched_coords(grid, self.gain.device), self.dim // 2, self.gain).flatten(-2) * self.gain
        return F.pad(signals, (0, 0, grid.prefix, 0))

    def step(self, number: int) -> Tensor:
        """Compute the signal of a step, counted from 1: (dim,)."""
        return sinusoids(self.gain.new_full((), number, dtype=torch.int64), self.dim, self.gain) * self.gain
