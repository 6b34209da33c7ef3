"""What the public operations demand of their arguments, in errors that name the argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relvit.ops.buckets import BUCKETINGS
from relvit.ops.grid import Grid, num_tokens
from relvit.ops.terms import AxisTables, JointTable, RelativeTerms
from relvit.ops.transforms import in_graph
from relvit.utils.messages import did_you_mean, listing


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: RelativeTerms,
    grid: Grid,
    key_grid: Grid,
    position_query: Tensor | None = None,
    position_key: Tensor | None = None,
) -> None:
    """Raise unless contents, terms and grids fit together; see `relvit.ops.relative_attention`."""
    check_tokens("query", query, "grid", grid)
    batch, heads, _, head_dim = query.shape
    key_grid_name = "grid" if key_grid is grid else "key_grid"
    check_tokens("key", key, key_grid_name, key_grid, (batch, heads, "N", head_dim))
    check_shape("value", value, (batch, heads, key.shape[2], "value_dim"))
    for name, tensor, like in (("position_query", position_query, query), ("position_key", position_key, key)):
        if tensor is not None:
            check_shape(name, tensor, tuple(like.shape))
    contents = {"key": key, "value": value, "position_query": position_query, "position_key": position_key}
    for name, tensor in contents.items():
        if tensor is not None and tensor.dtype != query.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected the query's {query.dtype}")
    check_terms(terms, heads, head_dim, value.shape[3])
    check_devices(query, contents, terms, {"grid": grid, key_grid_name: key_grid})


def check_devices(
    query: Tensor, contents: dict[str, Tensor | None], terms: RelativeTerms, grids: dict[str, Grid]
) -> None:
    """Raise unless all tensors are where the query is; some kernels would read foreign memory without a word."""
    named = dict(contents)
    for grid_name, grid in grids.items():
        named |= {f"{grid_name}.coords": grid.coords, f"{grid_name}.valid": grid.valid}
    for term, tables in zip(RelativeTerms._fields[:4], terms[:4], strict=True):
        if tables is not None:
            named |= {f"terms.{term}.{part}": table for part, table in zip(tables._fields, tables, strict=True)}
    for name, tensor in named.items():
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, expected the query's device, {query.device}")


def check_options(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, dropout_p: float, scale: float | None
) -> None:
    """Raise unless mask, dropout and scale are what attention can use."""
    if attn_mask is not None:
        _check_kind("attn_mask", attn_mask, Tensor, "a tensor")
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(
                f"attn_mask has dtype {attn_mask.dtype}, expected booleans, True where attention is allowed, "
                "or floating numbers to add to the logits"
            )
        full = (*query.shape[:2], query.shape[2], key.shape[2])
        sizes = zip(reversed(attn_mask.shape), reversed(full), strict=False)
        if attn_mask.dim() > 4 or any(size not in (1, whole) for size, whole in sizes):
            raise ValueError(
                f"attn_mask has shape {tuple(attn_mask.shape)}, expected one that broadcasts to (B, heads, Nq, Nk) = "
                f"{full}; a padding mask of the keys, (B, patches), goes into the grid's `valid`"
            )
        if attn_mask.device != query.device:
            raise ValueError(f"attn_mask is on {attn_mask.device}, expected the query's device, {query.device}")
        if is_causal:
            raise ValueError("attn_mask and is_causal exclude each other: put the causal part into attn_mask")
    for name, number in (("dropout_p", dropout_p), ("scale", 1.0 if scale is None else scale)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"{name} must be a number, got {number!r} of type {type(number).__name__}")
    # A graph may have a symbol for the scale.
    if scale is not None and not in_graph() and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")


def check_backend(name: str, backends: Sequence[str]) -> None:
    """Raise unless `name` is 'auto' or one of `backends`."""
    allowed = ["auto", *backends]
    if name not in allowed:
        raise ValueError(f"unknown backend {name!r}{did_you_mean(str(name), allowed)}, allowed: {listing(allowed)}")


def check_separable(terms: RelativeTerms, backend: str) -> None:
    """Raise if a table is joint."""
    for name, tables in zip(RelativeTerms._fields, terms, strict=True):
        if isinstance(tables, JointTable):
            raise ValueError(f"terms.{name} is a joint table: backend 'gathered' or 'reference', not {backend!r}")


def check_shape(name: str, tensor: Tensor, expected: tuple[int | str, ...]) -> None:
    """Compare with the numbers in `expected`; its strings name sizes that may be anything. Contents are floating."""
    _check_kind(name, tensor, Tensor, "a tensor")
    fits = tensor.dim() == len(expected) and all(
        isinstance(want, str) or have == want for have, want in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected ({', '.join(map(str, expected))})")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} has dtype {tensor.dtype}, expected a floating one")


def check_tokens(
    name: str,
    tokens: Tensor,
    grid_name: str,
    grid: Grid,
    expected: tuple[int | str, ...] = ("B", "heads", "N", "head_dim"),
) -> None:
    """Raise unless `tokens` has the expected shape, with as many tokens as `grid` lays out."""
    check_shape(name, tokens, expected)
    if not isinstance(grid, Grid):
        raise TypeError(f"{grid_name} must be a Grid, got {type(grid).__name__}: make_grid(height, width) makes one")
    for part, tensor in (("coords", grid.coords), ("valid", grid.valid)):
        if tensor is not None:
            _check_kind(f"{grid_name}.{part}", tensor, Tensor, "a tensor")
    if tokens.shape[2] != num_tokens(grid):
        raise ValueError(
            f"{name} has shape {tuple(tokens.shape)}, that is {tokens.shape[2]} tokens, expected {num_tokens(grid)}: "
            f"{grid_name} has {grid.prefix} prefix tokens and {num_tokens(grid) - grid.prefix} patches"
        )
    patches = num_tokens(grid) - grid.prefix
    for part, tensor, tail in (("coords", grid.coords, (patches, 2)), ("valid", grid.valid, (patches,))):
        if tensor is not None and tuple(tensor.shape) not in (tail, (1, *tail), (tokens.shape[0], *tail)):
            raise ValueError(
                f"{grid_name}.{part} has shape {tuple(tensor.shape)}, expected {tail} or {(tokens.shape[0], *tail)}"
            )


def check_terms(terms: RelativeTerms, heads: int, head_dim: int, value_dim: int) -> None:
    """Raise unless the tables fit the heads and the widths."""
    if not isinstance(terms, RelativeTerms):
        raise TypeError(
            f"terms must be RelativeTerms, got {type(terms).__name__} (without relative terms: RelativeTerms())"
        )
    if terms.bucketing not in BUCKETINGS:
        hint = did_you_mean(str(terms.bucketing), BUCKETINGS)
        raise ValueError(f"terms.bucketing must be one of {listing(BUCKETINGS)}, got {terms.bucketing!r}{hint}")
    widths = {"query": (head_dim,), "key": (head_dim,), "value": (value_dim,), "bias": ()}
    for term, width in widths.items():
        tables: AxisTables | JointTable | None = getattr(terms, term)
        if tables is None:
            continue
        _check_kind(f"terms.{term}", tables, (AxisTables, JointTable), "AxisTables or a JointTable")
        axes = 2 if isinstance(tables, JointTable) else 1
        for part, table in zip(tables._fields, tables, strict=True):
            _check_table(f"terms.{term}.{part}", table, axes, heads, width)


def _check_table(name: str, table: Tensor, axes: int, heads: int, width: tuple[int, ...]) -> None:
    _check_kind(name, table, Tensor, "a tensor")
    shape = tuple(table.shape)
    offsets = shape[len(shape) - len(width) - axes : len(shape) - len(width)]
    lead = shape[: max(0, len(shape) - len(width) - axes)]
    if len(offsets) != axes or shape[len(lead) + axes :] != width or lead not in ((), (heads,)):
        tail = ", ".join(["2k + 1"] * axes + [str(size) for size in width])
        raise ValueError(f"{name} has shape {shape}, expected ({tail}) or ({heads}, {tail})")
    if any(size % 2 == 0 for size in offsets):
        sizes = " x ".join(map(str, offsets))
        raise ValueError(f"{name} has {sizes} rows, expected an odd number, 2k + 1 for clip distance k")
    if not table.is_floating_point():
        raise TypeError(f"{name} has dtype {table.dtype}, expected a floating one")


def _check_kind(name: str, given: Any, kinds: type | tuple[type, ...], expected: str) -> None:
    if not isinstance(given, kinds):
        raise TypeError(f"{name} must be {expected}, got {type(given).__name__}")
