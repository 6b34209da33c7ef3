"""`relative_attention` as an operator of PyTorch: what `torch.jit.script` puts into a model.

TorchScript looks into no backend. `torch.ops.relvit.relative_attention` takes the tables, the grid and the options one
by one and runs the operation itself, with autograd, autocast and the choice of a backend as ever. A saved script needs
relvit to be imported where it is loaded, as it needs torchvision for torchvision's operators. (A traced model needs
nothing: it is made of PyTorch's own operators.) `torch.jit.freeze` fails where a term is absent: TorchScript has no
constants of a union of types.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from relvit.ops.attention import relative_attention
from relvit.ops.grid import Grid
from relvit.ops.terms import AxisTables, Channels, JointTable, RelativeTerms

LIBRARY = torch.library.Library("relvit", "DEF")


def register_operator(schema: str, run: Callable[..., Tensor]) -> None:
    """Make a Python function that is made of PyTorch's operators an operator itself, `torch.ops.relvit.<name>`."""
    LIBRARY.define(schema)
    # Composite: autograd, autocast and every device know what it is made of.
    LIBRARY.impl(schema.split("(")[0], run, "CompositeImplicitAutograd")


def scripted_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: RelativeTerms | None,
    grid: Grid,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    backend: str,
    trained_keys: int | None = None,
    position_query: Tensor | None = None,
    position_key: Tensor | None = None,
) -> Tensor:
    """Call `relvit.ops.relative_attention` from code that TorchScript compiles; the same arguments and result.

    Without terms `terms` is None: TorchScript has no constants of the kind of `RelativeTerms()`.
    """
    tables = tables_of(None if terms is None else terms.query)
    tables += tables_of(None if terms is None else terms.key)
    tables += tables_of(None if terms is None else terms.value)
    tables += tables_of(None if terms is None else terms.bias)
    tables += channels_of(None if terms is None else terms.channels)
    return torch.ops.relvit.relative_attention(
        query,
        key,
        value,
        tables,
        "clip" if terms is None else terms.bucketing,
        [grid.height, grid.width, grid.prefix],
        grid.coords,
        grid.valid,
        attn_mask,
        is_causal,
        dropout_p,
        scale,
        backend,
        trained_keys,
        position_query,
        position_key,
    )


def tables_of(term: AxisTables | JointTable | None) -> list[Tensor | None]:
    """List rows and columns, or the joint table and None, or None twice."""
    if isinstance(term, AxisTables):
        return [term.rows, term.cols]
    if isinstance(term, JointTable):
        return [term.table, None]
    return [None, None]


def channels_of(channels: Channels | None) -> list[Tensor | None]:
    """List channels of queries and keys, or None twice."""
    if channels is None:
        return [None, None]
    return [channels.query, channels.key]


def terms_of(tables: list[Tensor | None], bucketing: str) -> RelativeTerms:
    """Put together again what `tables_of` lists of each of the four terms, and `channels_of` where they are there."""
    terms: list[AxisTables | JointTable | None] = []
    for first, second in zip(tables[:8:2], tables[1:8:2], strict=True):
        term = JointTable(first) if second is None else AxisTables(first, second)
        terms.append(None if first is None else term)
    channels = Channels(*tables[8:]) if len(tables) > 8 and tables[8] is not None else None
    return RelativeTerms(*terms, bucketing, channels)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: list[Tensor | None],
    bucketing: str,
    sizes: list[int],
    coords: Tensor | None,
    valid: Tensor | None,
    *options: object,
) -> Tensor:
    grid = Grid(*sizes, coords, valid)
    names = (
        *("attn_mask", "is_causal", "dropout_p", "scale", "backend"),
        *("trained_keys", "position_query", "position_key"),
    )
    # PyTorch leaves out the last ones where they have their defaults.
    given = dict(zip(names, options, strict=False))
    return relative_attention(query, key, value, terms_of(tables, bucketing), grid, **given)


# `tables` holds two for each term, rows and columns, or a joint one and None, then two channels; `sizes` height, width
# and prefix.
register_operator(
    "relative_attention(Tensor query, Tensor key, Tensor value, Tensor?[] tables, str bucketing, "
    "int[] sizes, Tensor? coords, Tensor? valid, "
    "Tensor? attn_mask, bool is_causal, float dropout_p, float? scale, str backend, int? trained_keys=None, "
    "Tensor? position_query=None, Tensor? position_key=None) -> Tensor",
    _run,
)
