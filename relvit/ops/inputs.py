"""`AttentionInputs`: all arguments of one relative attention as a value, checked once; channels appended to q and k."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relvit.ops.buckets import BUCKETINGS
from relvit.ops.checks import check_kind, check_shape
from relvit.ops.grid import Grid, check_tokens, key_mask
from relvit.ops.terms import AxisLogits, AxisTables, Channels, JointTable, RelativeTerms, with_query_bias
from relvit.ops.tracing import knows_values
from relvit.utils.messages import check_choice
from relvit.utils.old_torch import compiled_replace

# Backends may divide and multiply by a scale in this range without overflow, even in half precision. `completed`
# multiplies queries by any other scale, so that backends get the scale 1.
SMALLEST_SCALE, LARGEST_SCALE = 1e-3, 1e3


@compiled_replace
class AttentionInputs(NamedTuple):
    """The arguments of `relvit.ops.relative_attention`.

    The function `checked` returns inputs of which only `attn_mask` and `trained_keys` may be None. In its result a mask
    has at least two axes, and is boolean or has the query's dtype; the two tables of a term are either both shared by
    the heads or both per head.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    terms: RelativeTerms
    grid: Grid
    key_grid: Grid | None = None
    attn_mask: Tensor | None = None
    is_causal: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    position_query: Tensor | None = None
    position_key: Tensor | None = None
    trained_keys: int | None = None

    def to(self, dtype: torch.dtype) -> AttentionInputs:
        """Convert queries, keys and values; a tensor in two roles (query and position query) is converted once."""
        query, key = self.query.to(dtype), self.key.to(dtype)
        position_query, position_key = self.position_query, self.position_key
        if position_query is not None:
            position_query = query if position_query is self.query else position_query.to(dtype)
        if position_key is not None:
            position_key = key if position_key is self.key else position_key.to(dtype)
        positions = {"position_query": position_query, "position_key": position_key}
        return self._replace(query=query, key=key, value=self.value.to(dtype), **positions)


# `Projected` is queries, keys and values, (B, heads, N, head_dim) each. If no norm follows the projection, `Projected`
# may also be one tensor (B, N, 3 heads, head_dim), as the projection returns it, which saves the operations that would
# split this tensor.
Projected = Tensor | tuple[Tensor, Tensor, Tensor]


def separate(projected: Projected) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, (B, heads, N, head_dim) each."""
    if not isinstance(projected, Tensor):
        return projected
    query, key, value = (part.transpose(1, 2) for part in projected.chunk(3, dim=2))
    return query, key, value


def checked(inputs: AttentionInputs) -> AttentionInputs:
    """Raise unless the inputs fit together, as `relvit.ops.relative_attention` describes, and fill in all defaults."""
    if inputs.attn_mask is not None:
        check_kind("attn_mask", inputs.attn_mask, Tensor, "a tensor")
    _check_contents(inputs, inputs.grid if inputs.key_grid is None else inputs.key_grid)
    _check_options(inputs)
    return completed(inputs)


def completed(inputs: AttentionInputs) -> AttentionInputs:
    """Fill in the defaults of inputs that fit together."""
    query, key, grid, mask = inputs.query, inputs.key, inputs.grid, inputs.attn_mask
    key_grid = grid if inputs.key_grid is None else inputs.key_grid
    scale = query.shape[3] ** -0.5 if inputs.scale is None else inputs.scale
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
        mask = mask[(None,) * max(0, 2 - mask.dim())]
    terms, biased = inputs.terms, (query, inputs.position_query)
    query, position_query = (part if part is None else with_query_bias(part, terms)[0] for part in biased)
    position_query = query if position_query is None else position_query
    position_key = key if inputs.position_key is None else inputs.position_key
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        # Backends divide the bias and a mask's gradient by the scale, and multiply the numbers that hide padding by the
        # scale, which might overflow. So multiply queries, position queries and position keys by the scale here, and
        # give backends the scale 1.
        position_query, position_key = scale * position_query, scale * position_key
        query, terms, scale = scale * query, with_axis_factor(terms, scale), 1.0
    return inputs._replace(
        query=query,
        terms=with_equal_heads(terms)._replace(query_bias=None),
        key_grid=key_grid,
        attn_mask=mask,
        scale=scale,
        position_query=position_query,
        position_key=position_key,
    )


def computing_dtype(query: Tensor, backend: str) -> torch.dtype:
    """Return the dtype in which a backend computes attention of these queries."""
    if backend in ("tiled", "gathered"):
        # Logits, softmax and sums of tiles would lose too many digits in half precision, so compute in float32.
        return torch.promote_types(query.dtype, torch.float32)
    kind = query.device.type
    if backend == "fused" and query.dtype != torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind):
        # Under autocast stock attention converts its operands to half precision, so make the operands in that dtype. In
        # float16 the number that hides padding in float32 would be infinite, and so would large biases and channels.
        return torch.get_autocast_dtype(kind)
    return query.dtype


def signature(given: Any) -> Any:
    """Describe inputs, or a part of them, by all that checks read: plain values; shapes, dtypes, devices of tensors.

    Raise TypeError for all other values, such as instances of a subclass of `Tensor` other than `Parameter`.
    """
    kind = type(given)
    if kind is Tensor or kind is nn.Parameter:
        return given.shape, given.dtype, given.device
    if isinstance(given, tuple):
        return kind, *map(signature, given)
    if given is None or kind in (int, float, bool, str):
        return given
    raise TypeError(f"{kind.__name__} has no signature")


def with_equal_heads(terms: RelativeTerms) -> RelativeTerms:
    """Expand the table that all heads share to one table per head, if the other table of the term has one per head."""
    for name, tables in zip(RelativeTerms._fields, terms, strict=True):
        if isinstance(tables, AxisTables) and tables.rows.dim() != tables.cols.dim():
            heads = max(tables, key=Tensor.dim).shape[0]
            per_head = (table.expand(heads, *table.shape[-min(t.dim() for t in tables) :]) for table in tables)
            terms = terms._replace(**{name: AxisTables(*per_head)})
    return terms


def with_axis_factor(terms: RelativeTerms, factor: Tensor | float) -> RelativeTerms:
    """Multiply the terms' `axis_logits` by a number, or one for each sample, (1 or B, 1, 1, 1)."""
    if terms.axis_logits is None:
        return terms
    return terms._replace(axis_logits=AxisLogits(*((part * factor).to(part.dtype) for part in terms.axis_logits)))


def with_channels(inputs: AttentionInputs) -> AttentionInputs:
    """Append the free channels to queries and keys, in the queries' dtype; position queries and keys do not change.

    In half precision, large products that nearly cancel, such as squared coordinates, would lose all bits. So in half
    precision each number is split into a high and a low part, and each channel becomes three channels, for the products
    high . high, low . high and high . low.
    """
    channels, dtype = inputs.terms.channels, inputs.query.dtype
    if channels is None:
        return inputs
    # Backends multiply all products by the scale. The products of channels must not be scaled, so divide the queries'
    # channels by the scale here, in float32 at least: in half precision the quotient would be rounded.
    query = channels.query.to(torch.promote_types(channels.query.dtype, torch.float32)) / inputs.scale
    key = channels.key
    if dtype == torch.float16 and query.numel() and key.numel():
        query, key = _balanced(query, key, key_mask(inputs.key_grid))
    if added_width(inputs.terms, dtype) > key.shape[-1]:
        (query, query_rest), (key, key_rest) = ((part, part - part.to(dtype)) for part in (query, key))
        query, key = torch.cat((query, query_rest, query), dim=-1), torch.cat((key, key, key_rest), dim=-1)
    query, key = (
        torch.cat((content, part.to(dtype).expand(*content.shape[:-1], -1)), dim=-1)
        for content, part in ((inputs.query, query), (inputs.key, key))
    )
    return inputs._replace(query=query, key=key, terms=inputs.terms._replace(channels=None))


def _balanced(query: Tensor, key: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Make the largest numbers of queries and of keys about equal in each channel, without a change of any product.

    Otherwise squared coordinates divided by the scale may exceed 65504, the largest number of float16. The factors are
    powers of two, so multiplying by them does not round. `valid` is the `key_mask`: numbers of padding do not count.
    """
    real = key if valid is None else key.where(valid[:, None, :, None], 0.0)
    largest, of_keys = (part.detach().float().abs().flatten(0, 2).amax(0) for part in (query, real))
    power = (of_keys.log2() - largest.log2()) / 2
    factor = power.round().nan_to_num(0.0, 0.0, 0.0).exp2()  # the factor is 1 for channels of zeros
    return query * factor, key / factor


def added_width(terms: RelativeTerms, dtype: torch.dtype) -> int:
    """Return by how much `with_channels` makes vectors longer."""
    return 0 if terms.channels is None else terms.channels.key.shape[-1] * (3 if dtype.itemsize < 4 else 1)


def _check_contents(inputs: AttentionInputs, key_grid: Grid) -> None:
    query, key, value, terms, grid, *_ = inputs
    check_tokens("query", query, "grid", grid)
    batch, heads, _, head_dim = query.shape
    key_grid_name = "grid" if key_grid is grid else "key_grid"
    if inputs.key_grid is None and isinstance(key, Tensor) and key.dim() == 4 and key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key has shape {tuple(key.shape)}, that is {key.shape[2]} tokens, and query has {query.shape[2]}: give "
            "key_grid, the Grid of the keys (with memory, of the tokens in memory and x)"
        )
    if isinstance(key, Tensor) and key.dim() == 4 and 0 < key.shape[1] < heads and heads % key.shape[1] == 0:
        raise ValueError(
            f"key has shape {tuple(key.shape)}, and query has {heads} heads: for grouped queries give keys and values "
            f"repeated, by repeat_interleave({heads // key.shape[1]}, dim=1)"
        )
    check_tokens("key", key, key_grid_name, key_grid, (batch, heads, "N", head_dim))
    check_shape("value", value, (batch, heads, key.shape[2], "value_dim"))
    named = {"key": key, "value": value}
    for name, like in (("position_query", query), ("position_key", key)):
        if (tensor := getattr(inputs, name)) is not None:
            check_shape(name, tensor, tuple(like.shape))
            named[name] = tensor
    for name, tensor in named.items():
        if tensor.dtype != query.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected the query's {query.dtype}")
    check_terms(terms, heads, head_dim, value.shape[3])
    if terms.channels is not None:
        check_kind("terms.channels", terms.channels, Channels, "Channels")
        for part, like in (("query", query), ("key", key)):
            channels, name = getattr(terms.channels, part), f"terms.channels.{part}"
            lead = [size if size == 1 else most for size, most in zip(channels.shape, (batch, heads), strict=False)]
            check_shape(name, channels, (*lead, like.shape[2], terms.channels.query.shape[-1]))
    if terms.axis_logits is not None:
        check_kind("terms.axis_logits", terms.axis_logits, AxisLogits, "AxisLogits")
        for part, size in (("rows", key_grid.height), ("cols", key_grid.width)):
            logits = getattr(terms.axis_logits, part)
            check_shape(f"terms.axis_logits.{part}", logits, (*query.shape[:3], size))
    # Refuse a tensor on another device, for which some kernels would read wrong memory without an error.
    for name, where in (("grid", grid), (key_grid_name, key_grid)):
        named |= {f"{name}.coords": where.coords, f"{name}.valid": where.valid}
    named |= {"terms.query_bias": terms.query_bias, "attn_mask": inputs.attn_mask}
    for term, tables in zip(RelativeTerms._fields, terms, strict=True):
        if isinstance(tables, tuple):
            named |= {f"terms.{term}.{part}": table for part, table in zip(type(tables)._fields, tables, strict=True)}
    for name, tensor in named.items():
        if tensor is not None and tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, expected the query's device, {query.device}")


def _check_options(inputs: AttentionInputs) -> None:
    mask, dropout_p, scale = inputs.attn_mask, inputs.dropout_p, inputs.scale
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(
                f"attn_mask has dtype {mask.dtype}, expected booleans, True where attention is allowed, "
                "or floating numbers to add to the logits"
            )
        full = (*inputs.query.shape[:3], inputs.key.shape[2])
        sizes = zip(reversed(mask.shape), reversed(full), strict=False)
        if mask.dim() > 4 or any(size not in (1, most) for size, most in sizes):
            raise ValueError(
                f"attn_mask has shape {tuple(mask.shape)}, expected one that broadcasts to (B, heads, Nq, Nk) = "
                f"{full}, prefix tokens included; a padding mask of the keys, (B, patches), goes into a grid's `valid`"
            )
        if inputs.is_causal:
            raise ValueError("attn_mask and is_causal exclude each other: put the causal part into attn_mask")
    given = {"dropout_p": dropout_p, "scale": scale, "trained_keys": inputs.trained_keys}
    for name, number in given.items():
        if number is None and name != "dropout_p":
            continue
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"{name} must be a number, got {number!r} of type {type(number).__name__}")
    # In a graph the scale may be a symbol without a known value, so check it only outside of graphs.
    if scale is not None and knows_values() and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if inputs.trained_keys is not None and not inputs.trained_keys >= 2:
        raise ValueError(f"trained_keys must be 2 or more, got {inputs.trained_keys}: one key always has the weight 1")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")


def check_terms(terms: RelativeTerms, heads: int, head_dim: int, value_dim: int) -> None:
    """Raise unless the tables and the bias of the queries fit the heads and the widths."""
    if not isinstance(terms, RelativeTerms):
        raise TypeError(
            f"terms must be RelativeTerms, got {type(terms).__name__} (without relative terms: RelativeTerms())"
        )
    check_choice("terms.bucketing", terms.bucketing, BUCKETINGS)
    widths = {"query": (head_dim,), "key": (head_dim,), "value": (value_dim,), "bias": ()}
    for term, width in widths.items():
        if (tables := getattr(terms, term)) is not None:
            check_kind(f"terms.{term}", tables, (AxisTables, JointTable), "AxisTables or a JointTable")
            axes = 2 if isinstance(tables, JointTable) else 1
            for part, table in zip(type(tables)._fields, tables, strict=True):
                _check_table(f"terms.{term}.{part}", table, axes, heads, width)
    if terms.query_bias is not None:
        check_shape("terms.query_bias", terms.query_bias, (heads, head_dim))


def _check_table(name: str, table: Tensor, axes: int, heads: int, width: tuple[int, ...]) -> None:
    check_kind(name, table, Tensor, "a tensor")
    shape = tuple(table.shape)
    first = len(shape) - len(width) - axes
    offsets = shape[max(0, first) : len(shape) - len(width)]
    if first < 0 or shape[first + axes :] != width or shape[:first] not in ((), (heads,)):
        tail = ", ".join(["2k + 1"] * axes + [str(size) for size in width])
        raise ValueError(f"{name} has shape {shape}, expected ({tail}) or ({heads}, {tail})")
    if any(size % 2 == 0 for size in offsets):
        sizes = " x ".join(map(str, offsets))
        raise ValueError(f"{name} has {sizes} rows, expected an odd number, 2k + 1 for clip distance k")
    if not table.is_floating_point():
        raise TypeError(f"{name} has dtype {table.dtype}, expected a floating-point dtype such as torch.float32")
