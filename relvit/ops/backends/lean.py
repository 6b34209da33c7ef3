"""Relative attention in as few operations as there are, for small grids and GPUs: one autograd function, by hand.

On small grids launching operations takes longer than their arithmetic. The augmented vectors are those of `fused`,
whose docstring derives them; here the usual case alone, a raster that attends to itself with tables per axis, takes one
`cat` of all tables, one product, one `gather`, one `cat` for queries, one for keys and values, stock attention, one
`scatter_add_` and one product. The backward is the same in reverse: it makes the augmented vectors again and calls the
backward of stock attention's own kernel. What depends on shapes alone is worked out once (`Plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.ops.backends.axis_logits import (
    WIDTH_MULTIPLE,
    Axes,
    clip_distances,
    grid_axes,
    table_index,
    with_columns,
)
from relvit.ops.backends.fused import one_hot
from relvit.ops.backends.stock import Kernel, stock_kernel
from relvit.ops.inputs import AttentionInputs
from relvit.ops.terms import AxisTables, RelativeTerms, with_width
from relvit.ops.tracing import without_autocast

DEVICES = ("cpu", "cuda")
# Taking a part of a table costs more than multiplying this number of rows that no pair of tokens can use.
SPARE_ROWS = 32
# On the CPU other backends take less time for more pairs of tokens than this, in all heads and samples.
MOST_PAIRS = 2**17


class Entries(NamedTuple):
    """The entries of a term's joined tables, a zero vector first, and those of each token by row and by column.

    Attributes:
        parts: the first row that is used, and the number of such rows, of both tables.
        zeros: in front of the tables, (1, dim), and behind them, up to a multiple of 8, by head for tables by head.
        index: (B, N, heads, S) int64, the entries for the S rows and columns of the grid; 0 for prefix tokens.
        sums: zeros, (B, N, heads, entries), in which numbers are added up; both are views of less memory.
    """

    parts: tuple[tuple[int, int], tuple[int, int]]
    zeros: tuple[Tensor, Tensor]
    index: Tensor
    sums: Tensor


class Plan(NamedTuple):
    """What follows from the shapes, the dtypes and the device of one attention.

    Attributes:
        heads: number of heads.
        width: of a head's vectors before they are augmented.
        scale: factor on the logits.
        hot: (B, N, heads, S), rows and columns of the tokens, one-hot.
        both_hot: (B, N, 2 heads, S), the same for keys and values that are one tensor.
        no_logits: (B, N, heads, S), zeros for queries, where there is neither a key term nor a bias.
        key, value, bias: entries of the terms; None: there is no such term.
        kernel: stock attention's.
    """

    heads: int
    width: int
    scale: float
    hot: Tensor
    both_hot: Tensor
    no_logits: Tensor
    key: Entries | None
    value: Entries | None
    bias: Entries | None
    kernel: Kernel


def refusal(inputs: AttentionInputs, device: str | None = None) -> str | None:
    """Return why this backend cannot compute inputs of `relvit.ops.inputs.checked`, or None if it can.

    Args:
        device: the kind of device that would compute; None: the query's.
    """
    query, terms, grid = inputs.query, inputs.terms, inputs.grid
    tables = [term for term in (terms.key, terms.value, terms.bias) if term is not None]
    vectors = [table for term in (terms.key, terms.value) if term is not None for table in term]
    if (device or query.device.type) not in DEVICES:
        return f"runs on {' and '.join(DEVICES)}, the query is on {query.device}"
    if any(part is not None for each in (grid, inputs.key_grid) for part in each[3:]) or inputs.key_grid != grid:
        return "takes the tokens of one raster as queries and keys, without padding"
    if inputs.attn_mask is not None or inputs.is_causal or inputs.dropout_p > 0 or inputs.trained_keys is not None:
        return "takes no attn_mask, is_causal, dropout_p and trained_keys"
    if terms.query is not None or terms.channels is not None or terms.axis_logits is not None or not tables:
        return "takes tables of keys and values and a bias as terms, and no others"
    if not all(isinstance(term, AxisTables) for term in tables):
        return "takes a table per axis"
    if inputs.position_query is not query or inputs.value.shape != query.shape:
        return "takes no position_query, and values as wide as the queries"
    if len({table.dim() for table in vectors}) > 1 or len({table.dtype for term in tables for table in term}) > 1:
        return "takes tables of one dtype that are all shared by the heads, or all for each head"
    if None not in (terms.key, terms.bias) and clip_distances(terms.key) != clip_distances(with_width(terms.bias)):
        return "takes a bias with the clip distances of the key term"
    lowered = torch.is_autocast_enabled(query.device.type) and torch.get_autocast_dtype(query.device.type)
    if lowered and query.dtype != lowered:
        return f"takes the dtype of autocast, {lowered}, got {query.dtype}"
    # Fake tensors have no kernels.
    if type(query) is Tensor and device in (None, query.device.type) and _kernel(inputs) is None:
        return "needs a fused kernel of stock attention, and PyTorch has none for these inputs"
    return None


def pays_on_cpu(inputs: AttentionInputs) -> bool:
    """Return whether there are so few pairs of tokens that operations cost more than their arithmetic."""
    batch, heads, tokens, _ = inputs.query.shape
    return batch * heads * tokens * tokens <= MOST_PAIRS


def _axes(inputs: AttentionInputs) -> Axes:
    """Return the rows and the columns of the grid, and columns without tokens that fill up the augmented width."""
    axes = grid_axes(inputs.grid)
    width = inputs.query.shape[-1] + sum(axis.size for axis in axes)
    return with_columns(axes, -width % WIDTH_MULTIPLE)


def _kernel(inputs: AttentionInputs) -> Kernel | None:
    query = inputs.query
    batch, heads, tokens, width = query.shape
    width += sum(axis.size for axis in _axes(inputs))
    operands = query.new_empty(3, batch, tokens, heads, width, requires_grad=True)
    return stock_kernel(*operands.transpose(2, 3))


# Tensors that are made in inference mode could not be kept for backward by a later training.
@torch.inference_mode(False)
def plan_of(inputs: AttentionInputs) -> Plan:
    """Work out the plan for inputs.

    Raises:
        ValueError: inputs that are refused, with the reason.
    """
    if (reason := refusal(inputs)) is not None:
        raise ValueError(f"backend 'lean' {reason}: use 'auto'")
    query, terms, grid = inputs.query, inputs.terms, inputs.grid
    (batch, heads, tokens, width), device = query.shape, query.device
    axes, by_token = _axes(inputs), (batch, tokens, heads)

    def entries(tables: AxisTables | None, sums: torch.dtype) -> Entries | None:
        if tables is None:
            return None
        distances = clip_distances(tables)
        reach, index = table_index(grid, distances, terms.bucketing, axes, device, SPARE_ROWS)
        parts = tuple((far - near, 2 * near + 1) for far, near in zip(distances, reach, strict=True))
        used = 1 + sum(number for _, number in parts)
        missing = -used % WIDTH_MULTIPLE
        lead, dim = tables.rows.shape[:-2], tables.rows.shape[-1]
        zeros = tuple(tables.rows.new_zeros(*lead, number, dim) for number in (1, missing))
        zero = query.new_zeros(1, dtype=sums).expand(*by_token, used + missing)
        return Entries(parts, zeros, index[0, 0][:, None].expand(*by_token, -1), zero)

    hot = one_hot(grid, axes, query.dtype, device)[0, 0][:, None]
    both_hot, hot = hot.expand(batch, tokens, 2 * heads, -1), hot.expand(*by_token, -1)
    no_logits = query.new_zeros(1).expand(*by_token, hot.shape[-1])
    # Sums of several marginals are computed in float32 at least, and rounded once; so are gradients of a bias.
    single = torch.promote_types(query.dtype, torch.float32)
    bias = None if terms.bias is None else with_width(terms.bias)
    of_key = entries(terms.key, query.dtype if bias is None else single)
    of_value, of_bias = entries(terms.value, single), entries(bias, single)
    return Plan(heads, width, inputs.scale, hot, both_hot, no_logits, of_key, of_value, of_bias, _kernel(inputs))


def relative_attention(inputs: AttentionInputs, plan: Plan | None = None) -> Tensor:
    """Compute attention with relative terms by a plan; see `relvit.ops.relative_attention`.

    Args:
        inputs: arguments of the usual case.
        plan: of these arguments; None: it is worked out here.

    Raises:
        ValueError: see `plan_of`.
    """
    plan = plan_of(inputs) if plan is None else plan
    contents = tuple(part.transpose(1, 2) for part in inputs[:3])
    return attend(contents, inputs.terms, plan).transpose(1, 2)


def attend(contents: tuple[Tensor, ...], terms: RelativeTerms, plan: Plan) -> Tensor:
    """Compute attention by a plan.

    Args:
        contents: queries, keys and values, (B, N, heads, head_dim) each, or all of them in one tensor (B, N, 3 heads,
            head_dim).
        terms: tables of keys, values and a bias.
        plan: for these shapes.

    Returns:
        (B, N, heads, head_dim).
    """
    tables = [table for term in (terms.key, terms.value, terms.bias) for table in term or (None, None)]
    if torch.is_grad_enabled():
        mixed = _Lean.apply(plan, len(contents), *contents, *tables)
    else:
        mixed = _forward(plan, contents, tables, _stock)[0]
    return _by_token(mixed, contents[0].shape[:2])


class _Lean(torch.autograd.Function):
    """Attention and its gradient; keeps contents, logits, attention by table entry, and what stock attention keeps."""

    @staticmethod
    def forward(ctx: FunctionCtx, plan: Plan, number: int, *tensors: Tensor | None) -> Tensor:
        contents, tables = tensors[:number], tensors[number:]
        mixed, kept, results = _forward(plan, contents, tables, plan.kernel.forward)
        ctx.plan, ctx.number = plan, number
        ctx.dtypes = [None if table is None else table.dtype for table in tables[::2]]
        # Some results of stock attention are numbers.
        ctx.numbers = [None if isinstance(part, Tensor) else (part,) for part in results]
        ctx.save_for_backward(*contents, *kept, *(part for part in results if isinstance(part, Tensor)))
        return mixed

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # Marked as differentiable once, this function would be left out of second derivatives without an error.
            raise RuntimeError("backend 'lean' has no second derivatives (create_graph=True): use backend='gathered'")
        if torch.is_autocast_enabled(grad.device.type):
            # Backward may run inside of a user's autocast.
            with without_autocast(grad.device):
                return _backward(ctx, grad)
        return _backward(ctx, grad)


def _backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    plan, saved, number = ctx.plan, ctx.saved_tensors, ctx.number
    contents, (key_table, value_table, logits, by_entry) = saved[:number], saved[number : number + 4]
    tensors = iter(saved[number + 4 :])
    results = [next(tensors) if part is None else part[0] for part in ctx.numbers]
    grad = _by_token(grad, contents[0].shape[:2])
    key_grads = value_grads = bias_grads = (None, None)
    if (entries := plan.value) is None:
        of_output = F.pad(grad, (0, plan.hot.shape[-1]))
    else:
        value_grads = _split(entries, _transposed_product(by_entry, grad, value_table), ctx.dtypes[1])
        of_entries = _by_token(_product(grad, value_table.transpose(-2, -1)), grad.shape[:2])
        of_output = torch.cat((grad, of_entries.gather(-1, entries.index)), dim=-1)
    operands = _operands(plan, contents, logits)
    grads = plan.kernel.backward(of_output.transpose(1, 2), operands, results, plan.scale)
    of_query, of_key, of_value = (part.transpose(1, 2).narrow(-1, 0, plan.width) for part in grads)
    of_logits = grads[0].transpose(1, 2).narrow(-1, plan.width, plan.hot.shape[-1])
    if (entries := plan.bias) is not None:
        of_logits = of_logits.to(entries.sums.dtype)
        of_bias = entries.sums.scatter_add(-1, entries.index, of_logits).sum((0, 1)) / plan.scale
        of_bias = of_bias.sum(0) if entries.zeros[0].dim() == 2 else of_bias
        bias_grads = (part[..., 0] for part in _split(entries, of_bias[..., None], ctx.dtypes[2]))
    if (entries := plan.key) is not None:
        of_entries = _to(entries.sums.scatter_add(-1, entries.index, of_logits), grad.dtype)
        query = operands[0].transpose(1, 2).narrow(-1, 0, plan.width)
        key_grads = _split(entries, _transposed_product(of_entries, query, key_table), ctx.dtypes[0])
        of_query = _by_token(_product(of_entries, key_table, of_query), grad.shape[:2])
    of_contents = (of_query, of_key, of_value)
    if number == 1:
        of_contents = (torch.cat(of_contents, dim=2),)
    return None, None, *of_contents, *key_grads, *value_grads, *bias_grads


def _forward(
    plan: Plan, contents: tuple[Tensor, ...], tables: Sequence[Tensor | None], stock: Callable[..., tuple[Any, ...]]
) -> tuple[Tensor, tuple[Tensor | None, ...], tuple[Any, ...]]:
    """Return the attention as `_product` returns it, what its backward needs, and the results of `stock`."""
    key_table, value_table, bias = _join(plan, tables, contents[0].dtype)
    logits = _logits(plan, contents[0], key_table, bias)
    results = stock(*_operands(plan, contents, logits), plan.scale)
    mixed, marginals = results[0].transpose(1, 2).split_with_sizes((plan.width, plan.hot.shape[-1]), -1)
    by_entry = None
    if (entries := plan.value) is not None:
        by_entry = _to(entries.sums.scatter_add(-1, entries.index, _to(marginals, entries.sums.dtype)), mixed.dtype)
        mixed = _product(by_entry, value_table, mixed)
    else:
        # Nothing else holds the result, so that it may be changed in place.
        mixed = mixed.flatten(0, 2).clone()
    return mixed, (key_table, value_table, logits, by_entry), results


def _stock(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor]:
    return (F.scaled_dot_product_attention(query, key, value, scale=scale),)


def _join(plan: Plan, tables: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """Join the tables of a term, in a dtype: key and value ([heads,] entries, head_dim), bias ([heads,] entries, 1)."""
    joined: list[Tensor | None] = [None, None, None]
    terms = [(number, entries) for number, entries in enumerate((plan.key, plan.value)) if entries is not None]
    if terms:
        pieces = [piece for number, entries in terms for piece in _pieces(entries, tables[2 * number : 2 * number + 2])]
        both, sizes = _to(torch.cat(pieces, dim=-2), dtype), [entries.sums.shape[-1] for _, entries in terms]
        for (number, _), part in zip(terms, both.split_with_sizes(sizes, -2), strict=True):
            joined[number] = part
    if plan.bias is not None:
        pair = [table[..., None] for table in tables[4:]]
        joined[2] = (torch.cat(_pieces(plan.bias, pair), dim=-2) / plan.scale).to(dtype)
    return joined


def _pieces(entries: Entries, tables: Sequence[Tensor]) -> list[Tensor]:
    """List zeros, the rows of both tables that are used, and zeros."""
    ((first_row, rows), (first_col, cols)), (before, behind), (of_rows, of_cols) = entries.parts, entries.zeros, tables
    if first_row:
        of_rows = of_rows.narrow(-2, first_row, rows)
    if first_col:
        of_cols = of_cols.narrow(-2, first_col, cols)
    return [before, of_rows, of_cols, behind]


def _split(entries: Entries, grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split the gradient of joined tables into those of both tables."""
    (first_row, rows), (first_col, cols) = entries.parts
    of_rows, of_cols = _to(grad, dtype).split_with_sizes((1, rows, cols, grad.shape[-2] - 1 - rows - cols), -2)[1:3]
    # Rows that are not used lie on both sides of those that are.
    if first_row:
        of_rows = F.pad(of_rows, (0, 0, first_row, first_row))
    if first_col:
        of_cols = F.pad(of_cols, (0, 0, first_col, first_col))
    return of_rows, of_cols


def _logits(plan: Plan, content: Tensor, key_table: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute the logits of each query for the rows and columns of the grid, (B, N, heads, S), before the scale."""
    heads = plan.heads
    batch, tokens = content.shape[:2]
    if bias is not None:
        bias = bias.expand(heads, -1, -1).transpose(-2, -1)
    if key_table is not None:
        # Head by head, the queries of a packed projection need no copy.
        by_head = _by_head(content, heads)
        table = key_table.expand(heads, -1, -1).transpose(-2, -1)
        by_entry = torch.bmm(by_head, table) if bias is None else torch.baddbmm(bias, by_head, table)
        entries = by_entry.shape[2]
        strides = (tokens * entries, entries, batch * tokens * entries, 1)
        by_entry = by_entry.as_strided((batch, tokens, heads, entries), strides)
        return by_entry.gather(-1, plan.key.index)
    if bias is not None:
        by_entry = bias.transpose(0, 1).expand(1, tokens, -1, -1)
        return by_entry.gather(-1, plan.bias.index[:1]).expand(batch, -1, -1, -1)
    return plan.no_logits


def _operands(plan: Plan, contents: tuple[Tensor, ...], logits: Tensor) -> tuple[Tensor, ...]:
    """Append logits to queries, and rows and columns to keys and values: (B, heads, N, width) each."""
    heads = plan.heads
    if len(contents) == 1:
        query, *both = contents[0].split_with_sizes((heads, 2 * heads), 2)
        both = torch.cat((*both, plan.both_hot), dim=-1).transpose(1, 2)
        key, value = both.split_with_sizes((heads, heads), 1)
    else:
        query, *both = contents
        key, value = (torch.cat((part, plan.hot), dim=-1).transpose(1, 2) for part in both)
    return torch.cat((query, logits), dim=-1).transpose(1, 2), key, value


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Even where it does nothing, `Tensor.to` takes as long as an operation.
    return x if x.dtype == dtype else x.to(dtype)


def _by_head(x: Tensor, heads: int | None = None) -> Tensor:
    """Reshape (B, N, heads, dim) to (heads, B N, dim), or the first heads alone: one view where memory allows it."""
    (batch, tokens, of_all, dim), (of_batch, of_token, of_head, of_number) = x.shape, x.stride()
    heads = of_all if heads is None else heads
    if of_batch == tokens * of_token:
        return x.as_strided((heads, batch * tokens, dim), (of_head, of_token, of_number))
    return x.flatten(0, 1).transpose(0, 1)[:heads]


def _product(weights: Tensor, table: Tensor, plus: Tensor | None = None) -> Tensor:
    """Multiply (B, N, heads, rows) by ([heads,] rows, dim), and add `plus`: (B N heads, dim) or (heads, B N, dim)."""
    if table.dim() == 2:
        weights = weights.flatten(0, 2)
        return torch.mm(weights, table) if plus is None else torch.addmm(plus.flatten(0, 2), weights, table)
    weights = _by_head(weights)
    return torch.bmm(weights, table) if plus is None else torch.baddbmm(_by_head(plus), weights, table)


def _by_token(product: Tensor, size: Sequence[int]) -> Tensor:
    """Reshape (B N heads, dim) or (heads, B N, dim) to (B, N, heads, dim), a view; `size`: (B, N)."""
    if product.dim() == 2:
        return product.view(*size, -1, product.shape[-1])
    return product.transpose(0, 1).unflatten(0, size)


def _transposed_product(weights: Tensor, vectors: Tensor, table: Tensor) -> Tensor:
    """Sum weights (B, N, heads, rows) times vectors (B, N, heads, dim) over tokens, as the shape of a table says."""
    if table.dim() == 2:
        return torch.mm(weights.flatten(0, 2).t(), vectors.flatten(0, 2))
    return torch.bmm(_by_head(weights).transpose(1, 2), _by_head(vectors))
