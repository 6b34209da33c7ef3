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
from relvit.ops.terms import AxisTables, JointTable, RelativeTerms

LIBRARY = torch.library.Library("relvit", "DEF")


def register_operator(schema: str, run: Callable[..., Tensor]) -> None:
    """Make a function in Python, made of PyTorch's operators, one itself: `torch.ops.relvit.<name>` of `schema`."""
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
) -> Tensor:
    """`relvit.ops.relative_attention` for code that TorchScript compiles; the same arguments and result.

    Without terms `terms` is None: TorchScript has no constants of the kind of `RelativeTerms()`.
    """
    query_rows, query_cols = tables_of(None if terms is None else terms.query)
    key_rows, key_cols = tables_of(None if terms is None else terms.key)
    value_rows, value_cols = tables_of(None if terms is None else terms.value)
    bias_rows, bias_cols = tables_of(None if terms is None else terms.bias)
    return torch.ops.relvit.relative_attention(
        query,
        key,
        value,
        query_rows,
        query_cols,
        key_rows,
        key_cols,
        value_rows,
        value_cols,
        bias_rows,
        bias_cols,
        "clip" if terms is None else terms.bucketing,
        grid.height,
        grid.width,
        grid.prefix,
        grid.coords,
        grid.valid,
        attn_mask,
        is_causal,
        dropout_p,
        scale,
        backend,
    )


def tables_of(term: AxisTables | JointTable | None) -> tuple[Tensor | None, Tensor | None]:
    """Rows and columns, or the joint table and None, or None twice."""
    if isinstance(term, AxisTables):
        return term.rows, term.cols
    if isinstance(term, JointTable):
        return term.table, None
    return None, None


def _term_of(first: Tensor | None, second: Tensor | None) -> AxisTables | JointTable | None:
    """The inverse of `tables_of`."""
    if first is None:
        return None
    return JointTable(first) if second is None else AxisTables(first, second)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_rows: Tensor | None,
    query_cols: Tensor | None,
    key_rows: Tensor | None,
    key_cols: Tensor | None,
    value_rows: Tensor | None,
    value_cols: Tensor | None,
    bias_rows: Tensor | None,
    bias_cols: Tensor | None,
    bucketing: str,
    height: int,
    width: int,
    prefix: int,
    coords: Tensor | None,
    valid: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    backend: str,
) -> Tensor:
    terms = RelativeTerms(
        _term_of(query_rows, query_cols),
        _term_of(key_rows, key_cols),
        _term_of(value_rows, value_cols),
        _term_of(bias_rows, bias_cols),
        bucketing,
    )
    return relative_attention(
        query,
        key,
        value,
        terms,
        Grid(height, width, prefix, coords, valid),
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        backend=backend,
    )


# Two tables for each term: rows and columns, or a joint one and None.
register_operator(
    "relative_attention(Tensor query, Tensor key, Tensor value, "
    "Tensor? query_rows, Tensor? query_cols, Tensor? key_rows, Tensor? key_cols, "
    "Tensor? value_rows, Tensor? value_cols, Tensor? bias_rows, Tensor? bias_cols, str bucketing, "
    "int height, int width, int prefix, Tensor? coords, Tensor? valid, "
    "Tensor? attn_mask, bool is_causal, float dropout_p, float? scale, str backend) -> Tensor",
    _run,
)
