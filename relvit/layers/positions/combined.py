"""Combine relative positions in one attention layer, such as LookHere's bias and tables for keys and values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from relvit.layers.positions.base import Position, is_stretchable, needs_tokens, terms_of
from relvit.ops import Grid, RelativeTerms
from relvit.ops.terms import add_channels, is_stock


class CombinedPosition2d(Position):
    """Combination of several relative positions in one layer, as `position="lookhere+tables"` in models.

    Each position is a submodule with its name in `makers`. Only one of the positions may have key tables, and likewise
    only one may have query tables, value tables or a bias. Free channels (`relvit.ops.Channels`) of several positions
    are concatenated, so the logits get the sum of their products.

    Examples:
        >>> makers = {"lookhere": LookHerePosition2d, "tables": partial(RelativePosition2d, rel_terms="kv")}
        >>> terms = CombinedPosition2d(head_dim=64, num_heads=12, makers=makers)(make_grid(4, 6))
        >>> terms.key.rows.shape, terms.bias.table.shape
        (torch.Size([15, 64]), torch.Size([12, 7, 11]))

    Args:
        head_dim, num_heads: see `Position`.
        makers: maps the name of each position to its class, or to a function that makes it; both are called with the
            arguments that `Position` describes.
        layer: (index, depth), passed to the positions that have an argument `layer`, see `LookHerePosition2d`.

    Attributes:
        needs_tokens: whether one of the positions needs tokens.
        stretchable: whether all positions read `trained_grid`.

    Raises:
        ValueError: two positions have a term of the same kind, or tables with different bucketings.
    """

    # The constructor sets both attributes, because they depend on the positions that are combined.
    needs_tokens: bool = False
    stretchable: bool = False

    def __init__(
        self,
        head_dim: int,
        num_heads: int,
        makers: Mapping[str, Callable[..., nn.Module]],
        layer: tuple[int, int] = (0, 1),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, make in makers.items():
            numbered = {"layer": layer} if "layer" in inspect.signature(make).parameters else {}
            self.add_module(name, make(head_dim, num_heads, **numbered, device=device, dtype=dtype))
        parts = list(self.children())
        self.needs_tokens = any(map(needs_tokens, parts))
        self.stretchable = all(map(is_stretchable, parts))
        of_grid = {name: part(Grid(1, 1)) for name, part in self.named_children() if not needs_tokens(part)}
        for term in (field for field in RelativeTerms._fields if field not in ("bucketing", "channels")):
            having = [repr(name) for name, terms in of_grid.items() if getattr(terms, term) is not None]
            if len(having) > 1:
                raise ValueError(
                    f"positions {' and '.join(having)} both have a {term}: combine positions with different terms "
                    "(rel_terms chooses those of 'tables')"
                )
        if len({terms.bucketing for terms in of_grid.values() if not is_stock(terms)}) > 1:
            raise ValueError(
                f"bucketing is for tables alone, not for {' and '.join(map(repr, of_grid))} together: leave it out"
            )

    def terms(self, x: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
        """Compute the terms of all positions, see `Position.terms`."""
        # Call the module instead of its method `forward`, so that hooks run.
        return self(grid, key_grid, x)

    def forward(self, grid: Grid, key_grid: Grid | None = None, x: Tensor | None = None) -> RelativeTerms:
        """Return the terms of all positions; positions that need tokens get them as in `terms`."""
        if key_grid is None or x is None:
            return _together(part(grid) for part in self.children())
        return _together(terms_of(part, x, grid, key_grid) for part in self.children())


def _together(parts: Iterable[RelativeTerms]) -> RelativeTerms:
    """Merge the terms of several positions; no two of them have a term of the same kind, except for channels."""
    whole = RelativeTerms()
    for terms in parts:
        given = {name: value for name, value in zip(RelativeTerms._fields, terms, strict=True) if value is not None}
        channels = given.pop("channels", None)
        # A position without tables leaves `bucketing` at its default, which must not replace the bucketing of another
        # position's tables.
        if is_stock(terms):
            del given["bucketing"]
        whole = whole._replace(**given)
        whole = whole if channels is None else add_channels(whole, channels)
    return whole
