"""`Position`: the base of relative position modules, and what attention asks of any module that is used as one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import ClassVar

from timm.layers import trunc_normal_
from torch import Tensor, nn

from relvit.ops import Grid, RelativeTerms
from relvit.ops.tracing import is_compiling


class Position(nn.Module):
    """Base of relative position modules: a module from where tokens are to `RelativeTerms`.

    A position implements `forward(grid)`, or `terms` where it depends on the tokens. Every block makes one of its own,
    called as `position(head_dim, num_heads, device=, dtype=)`, whether it uses these arguments or not. A module without
    this base needs no more than that and `forward(grid)`.

    Attributes:
        needs_tokens: the terms depend on tokens or are free channels, so that there are no tables to look at.
        needs_extent: the terms depend on the size of the image or on places in it, and not on offsets alone:
            `relvit.families.transformer_xl.set_bands` refuses them.
        trained_grid: rows and columns of patches in training: in images of another size offsets are divided by the
            ratio of sizes, see `relvit.models.set_reach`. None: they are not. A position that cannot be stretched in
            this way has no such attribute.
    """

    needs_tokens: ClassVar[bool] = False
    needs_extent: ClassVar[bool] = False

    def terms(self, x: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
        """Compute the terms for tokens `x`, (B, N, dim) on `grid`, that attend to those of `key_grid`."""
        return self(key_grid)


class LearnedPosition(nn.Module):
    """Base of positions with parameters: relative positions and absolute embeddings.

    Args:
        init_std: standard deviation of the truncated normal that initialises the parameters or, of a network, those of
            the last layers; 0: zeros, with which an attention layer computes what it computes without a position.

    Raises:
        ValueError: a negative standard deviation.
    """

    def __init__(self, init_std: float) -> None:
        super().__init__()
        if init_std < 0:
            raise ValueError(f"init_std must not be negative, got {init_std}")
        self.init_std = init_std

    def init_weights(self) -> None:
        """Initialise all parameters."""
        initialise(self.parameters(), self.init_std)

    def reset_parameters(self) -> None:
        """Initialise all parameters, for PyTorch and timm: they call it for modules made on the meta device."""
        self.init_weights()


def initialise(tables: Iterable[Tensor], std: float) -> None:
    """Fill tables from a normal of standard deviation `std`, truncated at ±2, or with zeros for 0."""
    for table in tables:
        if std:
            trunc_normal_(table, std=std)
        else:
            nn.init.zeros_(table)


def terms_of(position: nn.Module, x: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
    """Compute the terms of a position, with this base or without: see `Position.terms`."""
    terms = position.terms(x, grid, key_grid) if hasattr(position, "terms") else position(key_grid)
    if terms.query_bias is None and hasattr(position, "content_bias"):
        # The compiler cannot trace a warning.
        if not is_compiling():
            text = f"{type(position).__name__}: return content_bias as RelativeTerms(query_bias=...), which replaces it"
            warnings.warn(text, FutureWarning, stacklevel=2)
        terms = terms._replace(query_bias=position.content_bias)
    return terms


def needs_tokens(position: nn.Module) -> bool:
    """Return whether a position depends on tokens or has free channels."""
    return getattr(position, "needs_tokens", hasattr(position, "terms"))


def needs_extent(position: nn.Module) -> bool:
    """Return whether a position depends on the size of the image or on places in it."""
    return getattr(position, "needs_extent", False)


def is_stretchable(position: nn.Module) -> bool:
    """Return whether a position can count offsets in trained patches, by its attribute `trained_grid`."""
    return hasattr(position, "trained_grid")
