"""`Recurrence`: protocol of objects by which a model computes images part by part, with a memory, such as bands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn


class Recurrence(Protocol):
    """Protocol of a model's `recurrence`, an object without parameters.

    Attributes:
        lacks: maps what a model with this recurrence cannot do to the reason; `relvit.models.lack` lists the keys.
        undo: the call, as error messages show it, that makes the model compute whole images again.
    """

    lacks: ClassVar[Mapping[str, str]]
    undo: ClassVar[str]

    @classmethod
    def of(cls, model: nn.Module, *options: Any) -> Recurrence:
        """Return the recurrence of a model with these options, or raise ValueError where the model cannot have it."""
        ...

    def features(self, model: nn.Module, images: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """Compute the normalised tokens (B, N, dim) of images (B, in_chans, height, width)."""
        ...

    def classify(self, model: nn.Module, images: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """Compute the logits (B, num_classes) of images."""
        ...

    def mask(self, model: nn.Module, images: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """Return the mask (N, N) under which one pass over the whole image computes the same, for exported graphs."""
        ...


# `RECURRENCES` maps values of `set_reach`'s argument `reach`, such as 'bands', to the class of recurrence that they
# choose. Packages in `relvit.families` add entries.
RECURRENCES: dict[str, type[Recurrence]] = {}
