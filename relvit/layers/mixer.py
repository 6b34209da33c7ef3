"""`Mixer`: the base of modules through which tokens exchange information, and the plan of what one computes; `Leaf`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from timm.layers import register_notrace_module
from torch import Tensor, nn

from relvit.ops import Grid


class LayerPlan(NamedTuple):
    """Plan of a layer: what it does with the positions of tokens.

    Attributes:
        layer: name of the module.
        position: class of the position module, '' for none; of attention-free mixers, the class of the mixer.
        terms: letters as in `rel_terms`, and 'c' for free channels.
        backend: which backend computes the layer, '' for mixers without a choice.
        reason: why this backend.
        width: of the vectors of a head, and as augmented by 'fused'.
        keeps: what is kept for backward, besides inputs and output.
        parameters: of the position module, or of an attention-free mixer.
    """

    layer: str
    position: str
    terms: str
    backend: str
    reason: str
    width: tuple[int, int]
    keeps: str
    parameters: int


@register_notrace_module
class Leaf(nn.Module):
    """Base of modules that symbolic tracing (torch.fx) keeps whole, since they look at sizes."""


class Mixer(Leaf):
    """Base of mixers: modules whose `forward(x, grid, attn_mask, is_causal)` maps (B, N, dim) tokens to the same shape.

    A mixer of your own needs no base.

    Attributes:
        lacks: what a model with this mixer cannot do, with the reason; see `relvit.models.lack`.
    """

    lacks: ClassVar[Mapping[str, str]] = {}

    def plan(self, name: str, grid: Grid, training: bool, device: str | None = None) -> LayerPlan:
        """Return what the mixer of this name computes on a grid, with gradients or without, on a kind of device."""
        kind = type(self).__name__
        reason = f"{kind} replaces attention to all tokens"
        return LayerPlan(name, kind, "", "", reason, (self.head_dim,) * 2, "", count_parameters(self))

    def learned_bias(self, grid: Grid) -> Tensor | None:
        """Return the bias of an attention-free mixer: by offset (heads, rows, columns), or of all pairs (N, N)."""
        return None

    def refuse_mask(self, attn_mask: Tensor | None) -> None:
        """Raise ValueError for a mask, of mixers that have none."""
        if attn_mask is not None:
            raise ValueError(f"{type(self).__name__} has no attn_mask: padding goes into the grid's `valid`")


def count_parameters(module: nn.Module | None) -> int:
    """Count the parameters of a module; None: 0."""
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())
