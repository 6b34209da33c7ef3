"""`Mixer`, the base of token mixers such as attention; `LayerPlan`, how a layer is computed; `Leaf` for torch.fx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

from timm.layers import register_notrace_module
from torch import Tensor, nn

from relvit.ops import Grid, RelativeTerms
from relvit.utils.constants import FillConstants


class LayerPlan(NamedTuple):
    """How a layer computes attention with positions, for `relvit explain`.

    Attributes:
        layer: name of the module.
        position: class of the position module, '' for none; for attention-free mixers, the class of the mixer.
        terms: letters as in `rel_terms`, 'k' also for `relvit.ops.AxisLogits`, and 'c' for `relvit.ops.Channels`.
        backend: name of the backend, '' for mixers without a choice of backends.
        reason: why this backend is chosen.
        width: width of a head's vectors, before and after the backend 'fused' adds channels to them; 0 for mixers
            without heads.
        keeps: description of the tensors that are kept for backward, besides inputs and output.
        parameters: number of parameters of the position module, or of an attention-free mixer.
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
    """Base of modules that read sizes; timm's `create_feature_extractor` (torch.fx) keeps each of them as one node."""


class Mixer(FillConstants, Leaf):
    """Base of mixers: modules whose `forward(x, grid, attn_mask, is_causal)` maps (B, N, dim) tokens to the same shape.

    Your own mixer need not be a subclass of `Mixer`. If your mixer initialises parameters, write a method
    `init_weights`, and add `relvit.utils.constants.KeepConstants` as a second base, as in `AFTSimple`: PyTorch and timm
    call methods of `KeepConstants` to initialise modules that were made on the meta device.

    Examples:
        >>> class RowMean(Mixer):  # every token becomes the mean of its row
        ...     def forward(self, x, grid, attn_mask=None, is_causal=False):
        ...         rows = x.unflatten(1, (grid.height, grid.width))
        ...         return rows.mean(dim=2, keepdim=True).expand_as(rows).flatten(1, 2)
        >>> RowMean()(torch.randn(2, 24, 192), make_grid(4, 6)).shape
        torch.Size([2, 24, 192])

    Attributes:
        head_dim: width of a head's vectors; 0 for mixers without heads.
        lacks: what a model with this mixer cannot do. Key: one of the strings that `relvit.models.lack` takes as
            `need`. Value: the reason, which continues a sentence whose subject is the mixer, as in 'takes no memory'.
    """

    head_dim: int = 0
    lacks: ClassVar[Mapping[str, str]] = {"memory": "takes no memory", "weights": "shows no weights"}

    def plan(self, name: str, grid: Grid, training: bool, device: str | None = None) -> LayerPlan:
        """Return how the mixer of this name computes a grid, with gradients if `training`, on a kind of device."""
        kind = type(self).__name__
        reason = f"{kind} replaces attention to all tokens"
        return LayerPlan(name, kind, "", "", reason, (self.head_dim,) * 2, "", count_parameters(self))

    def position_terms(self, grid: Grid) -> RelativeTerms | None:
        """Return the terms of the mixer's `position` on a grid; None: there is none, or its terms depend on tokens."""
        return None

    def learned_bias(self, grid: Grid) -> Tensor | None:
        """Return the bias of an attention-free mixer by offset, (heads, rows, columns), or of all pairs, (N, N)."""
        return None

    def refuse_mask(self, attn_mask: Tensor | None) -> None:
        """Raise ValueError for a mask, in mixers without masks."""
        if attn_mask is not None:
            raise ValueError(f"{type(self).__name__} takes no attn_mask: mark padding in the grid's `valid`")


def lack_of(mixer: nn.Module | None, need: str) -> str | None:
    """Return the reason why a model with this mixer cannot do something, or None if it can; see `Mixer.lacks`."""
    reason = None if mixer is None else getattr(mixer, "lacks", Mixer.lacks).get(need)
    return None if reason is None else f"its {type(mixer).__name__} {reason}"


def count_parameters(module: nn.Module | None) -> int:
    """Count the parameters of a module; None: 0."""
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())
