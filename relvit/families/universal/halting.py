"""Adaptive computation time: halting probabilities of patches, remainders and the ponder cost, step by step."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from relvit.layers.mixer import Leaf
from relvit.ops import Grid
from relvit.utils.constants import KeepConstants


class HaltingState(NamedTuple):
    """State of the halting of a batch between two steps: a number for each of P patches of an image, (B, P)."""

    running: Tensor  # booleans, True for patches that compute the next step, False for halted patches and padding
    total: Tensor  # sum of the halting probabilities so far, at least float32
    steps: Tensor  # int64, number of steps computed so far; at the end it is N, see `AdaptiveHalting`
    remainder: Tensor  # the remainder R, see `AdaptiveHalting`, of patches that have halted; 0 for all other patches


def start_halting(patches: Tensor, grid: Grid) -> HaltingState:
    """Return the state before the first step for the P patches of each image, (B, P, dim), on `grid`."""
    shape = patches.shape[:2]
    running = patches.new_ones(shape, dtype=torch.bool)
    if grid.valid is not None:
        running = running & grid.valid
    total = patches.new_zeros(shape, dtype=torch.promote_types(patches.dtype, torch.float32))
    return HaltingState(running, total, patches.new_zeros(shape, dtype=torch.int64), total)


class AdaptiveHalting(KeepConstants, Leaf):
    """Graves' adaptive computation time (2016, arXiv 1603.08983, section 2) for every patch of an image.

    At step n a patch has the halting probability h_n = sigmoid(w . x_n + b), where x_n is the input of the step, as in
    the code of the Universal Transformer (Dehghani et al. 2018, arXiv 1807.03819, appendix C). The patch computes N
    steps: N is the first step at which h_1 + ... + h_N >= 1 - epsilon, or the model's last step. The output of the
    patch is the weighted sum of its states after steps 1 ... N. The weights are h_1, ..., h_(N-1) and the remainder R =
    1 - h_1 - ... - h_(N-1) (equations 6 to 9), so they add up to 1. The patch's ponder cost is N + R (equation 10), in
    which only R has a gradient.

    Examples:
        >>> model = timm.create_model("relvit_universal_tiny", img_size=64, halting="act").eval()
        >>> type(model.halting).__name__
        'AdaptiveHalting'
        >>> logits, steps, cost = model.ponder(torch.randn(2, 3, 64, 96))
        >>> steps.shape, cost.shape
        (torch.Size([2, 24]), torch.Size([2]))

    Args:
        dim: width of the tokens.
        epsilon: a patch halts when its halting probabilities add up to 1 - epsilon or more.
        bias_init: initial b; w starts at zero. -3 gives a probability of 0.05. If b started at 0, or at 1 as in Graves'
            experiments, patches would at first halt after two steps, and most would never learn to compute more steps.

    Raises:
        ValueError: `epsilon` is not between 0 and 1.
    """

    def __init__(
        self,
        dim: int,
        epsilon: float = 0.01,
        bias_init: float = -3.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 < epsilon < 1:
            raise ValueError(f"epsilon (a model's halting_epsilon) must be above 0 and below 1, got {epsilon}")
        self.threshold: float = 1 - epsilon
        self.bias_init = bias_init
        self.weight: nn.Parameter = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        # PyTorch's `fully_shard` takes no parameter without an axis, so b has one.
        self.bias: nn.Parameter = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        self.init_weights()

    def init_weights(self) -> None:
        """Initialise w and b."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, self.bias_init)

    def forward(self, patches: Tensor) -> Tensor:
        """Compute the halting probabilities (B, P) of the P patches of each image, (B, P, dim), at least in float32."""
        # Sums of probabilities need more than half precision. Multiply elementwise, because autocast would compute a
        # matrix product in half precision.
        wide = torch.promote_types(patches.dtype, torch.float32)
        return ((patches.to(wide) * self.weight.to(wide)).sum(-1) + self.bias.to(wide)).sigmoid()

    def advance(self, state: HaltingState, probability: Tensor, last: bool) -> tuple[Tensor, HaltingState]:
        """Compute the weights of the patches' states after a step, and the new state of the halting.

        Args:
            state: the state of the halting before the step.
            probability: (B, P) of P patches per image, from `forward`; entries of patches that do not run are ignored.
            last: whether there are no steps after this one.

        Returns:
            Weights (B, P), zero for patches that do not run, and the state of the halting after the step.
        """
        running = state.running
        probability = torch.where(running, probability, 0.0)
        halts = running
        if not last:
            halts = running & (state.total + probability >= self.threshold)
        rest = 1 - state.total
        weights = torch.where(halts, rest, probability)
        remainder = torch.where(halts, rest, state.remainder)
        return weights, HaltingState(
            running & ~halts, state.total + probability, state.steps + running.long(), remainder
        )


def ponder_cost(state: HaltingState, grid: Grid) -> Tensor:
    """Compute the mean of N + R over the patches of each image, (B,), without padding; only R has a gradient."""
    cost = state.steps + state.remainder
    if grid.valid is None:
        return cost.mean(1)
    valid = grid.valid.expand(cost.shape)
    return torch.where(valid, cost, 0.0).sum(1) / valid.sum(1).clamp(min=1)
