"""Several relative positions in one layer, such as LookHere's bias beside tables for keys and values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from relvit.layers.positions.base import Position, is_stretchable, needs_tokens, terms_of
from relvit.ops import Grid, RelativeTerms
from relvit.ops.terms import add_channels, is_stock


class CombinedPosition2d(Position):
    """Several relative positions in one: their terms together, as `position="lookhere+tables"` in models.

    Each position is a submodule with its name in `makers`. Tables for queries, keys, values and a bias may each come
    from one position alone. Free channels of several positions are joined, which adds their products.

    Examples:
        >>> makers = {"lookhere": LookHerePosition2d, "tables": partial(RelativePosition2d, rel_terms="kv")}
        >>> terms = CombinedPosition2d(head_dim=64, num_heads=12, makers=makers)(make_grid(4, 6))
        >>> terms.key.rows.shape, terms.bias.table.shape
        (torch.Size([15, 64]), torch.Size([12, 7, 11]))

    Args:
        head_dim, num_heads: see `Position`.
        makers: each position's name and class, or function that makes it, called as `Position` says.
        layer: given to the positions that have an argument `layer`, see `LookHerePosition2d`.

    Attributes:
        needs_tokens: whether one of the positions needs tokens.
        stretchable: whether all positions read `trained_grid`.

    Raises:
        ValueError: two positions have a term of the same kind, or tables with different bucketings.
    """

    # The constructor sets both, by the positions of this layer.
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
                f"bucketing is for tables alone, and {' and '.join(map(repr, of_grid))} are together here: leave it out"
            )

    def terms(self, x: Tensor, grid: Grid, key_grid: Grid) -> RelativeTerms:
        """Compute the terms of all positions, see `Position.terms`."""
        return _together(terms_of(part, x, grid, key_grid) for part in self.children())

    def forward(self, grid: Grid) -> RelativeTerms:
        """Return the terms of all positions, which are tables."""
        return _together(part(grid) for part in self.children())


def _together(parts: Iterable[RelativeTerms]) -> RelativeTerms:
    """Return terms that contain the terms of all parts."""
    whole = RelativeTerms()
    for terms in parts:
        given = {name: value for name, value in zip(RelativeTerms._fields, terms, strict=True) if value is not None}
        channels = given.pop("channels", None)
        # A part without tables has no bucketing, only its default.
        if is_stock(terms):
            del given["bucketing"]
        whole = whole._replace(**given)
        whole = whole if channels is None else add_channels(whole, channels)
    return whole
