"""Relative attention in as few operations as possible, for small grids and GPUs: one autograd function.

On small grids launching operations takes longer than their arithmetic. The augmented vectors are the same as in
`fused`, and the docstring of `fused` derives them. This backend computes only the usual case, in which the tokens of a
grid without `coords` attend to each other with tables per axis. The steps are one `cat` of all tables, one product, one
`gather`, one `cat` for queries, one for keys and values, stock attention, one `scatter_add` and one product. The
backward, written by hand, computes the gradients of these steps in reverse order: it makes the augmented vectors again
and calls the backward of stock attention's kernel. A `Plan` holds all values that depend only on shapes, dtypes and the
device, and is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from relvit.ops.backends import axis_logits
from relvit.ops.backends.axis_logits import (
    Entries,
    View,
    by_head,
    by_row,
    clip_distances,
    converted,
    placed,
    product,
    split_joined,
    sum_by_entry,
    to_finite,
    transposed_product,
    used_pieces,
)
from relvit.ops.backends.fused import one_hot
from relvit.ops.backends.stock import DEVICES, Kernel, stock_kernel
from relvit.ops.checks import check_backward
from relvit.ops.inputs import AttentionInputs
from relvit.ops.terms import AxisTables, with_width
from relvit.ops.tracing import without_autocast

# A table is sliced only if more than this number of rows are out of reach for all pairs of tokens: slicing takes longer
# than multiplying a few rows whose products no pair uses.
SPARE_ROWS = 32
# With more than this number of pairs of tokens, over all heads and samples, other backends are faster on the CPU.
MOST_PAIRS = 2**17
# If the relative logits and the one-hot rows and columns together hold more than `MOST_COPIED` numbers, copying them
# once instead of twice (see `Plan.apart`) saves more time than the additional calls cost.
MOST_COPIED = 2**23


class Plan(NamedTuple):
    """Values that the shapes, the dtypes and the device of one attention determine, remembered for all its calls.

    S is the number of rows plus the number of columns, by which vectors are augmented.
    """

    shape: tuple[int, int, int, int]  # shape of the queries, (B, N, heads, head_dim)
    heads: int
    width: int  # width of a head's vectors before they are augmented
    added: int  # S, the number of added channels
    scale: float
    hot: Tensor  # (B, N, heads, S), one-hot rows and columns of the tokens
    both_hot: Tensor  # (B, N, 2 heads, S), `hot` for keys and values in one tensor
    # Whether augmented queries get a separate block of memory: logits and `both_hot` are then copied once, not twice.
    apart: bool
    no_logits: Tensor  # (B, N, heads, S), zeros in place of logits if there is neither a key term nor a bias
    key: Entries | None  # None if there is no key term; `value` and `bias` likewise
    value: Entries | None
    bias: Entries | None
    vectors: tuple[Entries, ...]  # `key` and `value`, if not None: the terms with tables of vectors
    # Augmented queries, keys and values, (B, heads, N, width) each, are views of a block of memory. `operands[n - 1]`
    # has the n views of a block that holds n of the three tensors.
    operands: tuple[tuple[View, ...], ...]
    # `mixed` and `marginals` are views of stock attention's output, (B N heads, head_dim) and (B, N, heads, S).
    mixed: View
    marginals: View
    kernel: Kernel


def refusal(inputs: AttentionInputs, device: str | None = None) -> str | None:
    """Return why this backend cannot compute inputs, on the query's or another kind of device; None where it can."""
    query, terms, grid, kind = inputs.query, inputs.terms, inputs.grid, device or inputs.query.device.type
    tables = [term for term in (terms.key, terms.value, terms.bias) if term is not None]
    vectors = [table for term in (terms.key, terms.value) if term is not None for table in term]
    if kind not in DEVICES:
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
    lowered = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    if lowered and query.dtype != lowered:
        return f"takes the dtype of autocast, {lowered}, got {query.dtype}"
    if kind == query.device.type and _kernel(inputs) is None:
        return "needs a fused kernel of stock attention, and PyTorch has none for these inputs"
    return None


def pays_on_cpu(inputs: AttentionInputs) -> bool:
    """Return whether there are so few pairs of tokens that operations cost more than their arithmetic."""
    batch, heads, tokens, _ = inputs.query.shape
    return batch * heads * tokens * tokens <= MOST_PAIRS


def _axes(inputs: AttentionInputs) -> axis_logits.Axes:
    """Return the rows and the columns of the grid, and columns without tokens that fill up the augmented width."""
    axes = axis_logits.grid_axes(inputs.grid)
    width = inputs.query.shape[-1] + sum(axis.size for axis in axes)
    return axis_logits.with_columns(axes, -width % axis_logits.WIDTH_MULTIPLE)


def _kernel(inputs: AttentionInputs) -> Kernel | None:
    query, (batch, heads, tokens, width) = inputs.query, inputs.query.shape
    if type(query) is not Tensor:
        # Make no new tensors: `stock_kernel` reads only the device of fake tensors, and PyTorch 2.8 cannot make fake
        # tensors for an absent GPU.
        return stock_kernel(query, query, query)
    width += sum(axis.size for axis in _axes(inputs))
    # A plan made without gradients also serves training, so let PyTorch choose a kernel that has a backward: on an RTX
    # 4090, for example, flash attention of width 200 has none.
    with torch.inference_mode(False), torch.enable_grad():
        operands = query.new_empty(3, batch, tokens, heads, width, requires_grad=True)
        return stock_kernel(*operands.transpose(2, 3))


# PyTorch cannot save tensors made in inference mode for backward, and training may use this plan later, so make it
# outside of inference mode.
@torch.inference_mode(False)
def plan_of(inputs: AttentionInputs) -> Plan:
    """Work out the plan for inputs; raise ValueError if `refusal` gives a reason why there is none."""
    if (reason := refusal(inputs)) is not None:
        raise ValueError(f"backend 'lean' {reason}: use 'auto'")
    query, terms, grid = inputs.query, inputs.terms, inputs.grid
    (batch, heads, tokens, width), device = query.shape, query.device
    axes, by_token = _axes(inputs), (batch, tokens, heads)

    # `sum_by_entry` adds up marginals or gradients of logits for each table entry, in float32 at least, and rounds the
    # sum once: in half precision a GPU would round after each addition.
    single = torch.promote_types(query.dtype, torch.float32)

    def entries(tables: AxisTables | None) -> Entries | None:
        if tables is None:
            return None
        distances = clip_distances(tables)
        reach, index = axis_logits.table_index(grid, distances, terms.bucketing, axes, device, SPARE_ROWS)
        firsts = tuple(far - near for far, near in zip(distances, reach, strict=True))
        rows, cols = (2 * near + 1 for near in reach)
        used = rows + cols
        missing = 1 + (-1 - used) % axis_logits.WIDTH_MULTIPLE
        lead, dim = tables.rows.shape[:-2], tables.rows.shape[-1]
        zeros = tables.rows.new_zeros(*lead, missing, dim)
        # `table_index` expects a zero vector before the tables; here all zero vectors come after the tables, so shift
        # the index.
        index = (index[0, 0][:, None] - 1) % (used + missing)
        sums = query.new_zeros(1, dtype=single).expand(*by_token, used + missing)
        return Entries(firsts, (rows, cols, missing), zeros, index.expand(*by_token, -1), sums)

    hot = one_hot(grid, axes, query.dtype, device)[0, 0][:, None]
    both_hot, hot = hot.expand(batch, tokens, 2 * heads, -1), hot.expand(*by_token, -1)
    if device.type == "cpu":
        # On the CPU 'auto' chooses this backend only for small grids. There `cat` of contiguous tensors takes half as
        # long as `cat` of expanded views, so make this view contiguous.
        both_hot = both_hot.contiguous()
    apart = hot.numel() + both_hot.numel() > MOST_COPIED
    no_logits = query.new_zeros(1).expand(*by_token, hot.shape[-1])
    bias = None if terms.bias is None else with_width(terms.bias)
    key, value = placed(entries(terms.key), entries(terms.value))
    vectors = tuple(part for part in (key, value) if part is not None)
    wide = width + hot.shape[-1]
    blocks = tuple(
        tuple(
            View((batch, heads, tokens, wide), (tokens * each, wide, each, 1), first * heads * wide)
            for first in range(number)
        )
        for number, each in ((number, number * heads * wide) for number in (1, 2, 3))
    )
    mixed = View((batch * tokens * heads, width), (wide, 1), 0)
    marginals = View((*by_token, hot.shape[-1]), (tokens * heads * wide, heads * wide, wide, 1), width)
    return Plan(
        (*by_token, width), heads, width, hot.shape[-1], inputs.scale, hot, both_hot, apart, no_logits,
        key, value, entries(bias), vectors, blocks, mixed, marginals, _kernel(inputs),
    )  # fmt: skip


def relative_attention(inputs: AttentionInputs, plan: Plan | None = None) -> Tensor:
    """Compute attention with relative terms by a plan, or by `plan_of(inputs)`; see `relvit.ops.relative_attention`."""
    plan = plan_of(inputs) if plan is None else plan
    contents, terms = tuple(part.transpose(1, 2) for part in inputs[:3]), inputs.terms
    tables = [table for term in (terms.key, terms.value, terms.bias) if term is not None for table in term]
    return attend(contents, tables, plan).view(contents[0].shape).transpose(1, 2)


def attend(contents: tuple[Tensor, ...], tables: Sequence[Tensor], plan: Plan) -> Tensor:
    """Compute attention by a plan.

    Args:
        contents: queries, keys and values, (B, N, heads, head_dim) each, or all of them in one tensor (B, N, 3 heads,
            head_dim).
        tables: the row table and the column table of each term: of the key term, the value term, then the bias.

    Returns:
        (B N heads, head_dim), a tensor with memory of its own, so that callers may change it in place.
    """
    if torch.is_grad_enabled():
        return _Lean.apply(plan, len(contents), *contents, *tables)
    return _forward(plan, contents, tables, trains=False)[0]


class _Lean(torch.autograd.Function):
    """Attention and its gradient; keeps contents, logits, attention by table entry, and what stock attention keeps."""

    @staticmethod
    def forward(ctx: FunctionCtx, plan: Plan, number: int, *tensors: Tensor) -> Tensor:
        contents, tables = tensors[:number], tensors[number:]
        out, kept, results = _forward(plan, contents, tables, trains=True)
        # Some results of stock attention are not tensors, and autograd cannot save numbers: keep such results on `ctx`.
        numbers = [None if isinstance(part, Tensor) else (part,) for part in results]
        ctx.kept = plan, number, tables[0].dtype, numbers
        ctx.save_for_backward(*contents, *kept, *[part for part in results if isinstance(part, Tensor)])
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("lean", grad)
        # Users may call backward inside of autocast, which would change the dtypes of products here, so switch it off.
        inside = torch.is_autocast_enabled(grad.device.type)
        with without_autocast(grad.device) if inside else nullcontext():
            return _backward(ctx, grad)


def _forward(
    plan: Plan, contents: tuple[Tensor, ...], tables: Sequence[Tensor], trains: bool
) -> tuple[Tensor, tuple[Tensor | None, ...], Sequence[Any]]:
    """Return the attention (B N heads, head_dim), what its backward needs, and the results of stock attention."""
    joined, bias = _join(plan, tables, contents[0].dtype)
    logits = _logits(plan, contents[0], joined, bias)
    operands = _operands(plan, contents, logits, plan.apart)
    if trains:
        results = plan.kernel.forward(*operands, plan.scale)
    else:
        # Only backward reads the logits again, so free their memory.
        logits = None
        results = (F.scaled_dot_product_attention(*operands, scale=plan.scale),)
    del operands
    out, by_entry = results[0], None
    if out.stride() != plan.operands[0][0].stride:
        out = out.transpose(1, 2).contiguous()
    mixed = out.as_strided(*plan.mixed)
    if (entries := plan.value) is None:
        return mixed.clone(), (joined, logits, by_entry), results
    by_entry = sum_by_entry(entries, out.as_strided(*plan.marginals), out.dtype)
    return product(by_entry, joined.as_strided(*entries.table), mixed), (joined, logits, by_entry), results


def _backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    (plan, number, dtype, numbers), saved = ctx.kept, ctx.saved_tensors
    contents, (joined, logits, by_entry) = saved[:number], saved[number : number + 3]
    tensors = iter(saved[number + 3 :])
    results = [next(tensors) if part is None else part[0] for part in numbers]
    grad = grad.contiguous().view(plan.shape)
    of_keys, of_values, of_biases = [], [], []
    if (entries := plan.value) is None:
        of_output = F.pad(grad, (0, plan.added))
    else:
        table = _part(joined, entries.table)
        of_values = [transposed_product(by_entry, grad, table)]
        of_entries = product(grad, table.transpose(-2, -1)).view(by_entry.shape)
        of_output = torch.cat((grad, of_entries.gather(-1, entries.index)), -1)
    operands = _operands(plan, contents, logits, apart=True)
    grads = plan.kernel.backward(of_output.transpose(1, 2), operands, results, plan.scale)
    of_query, of_key = _channels(grads[0], 0, plan.width), _channels(grads[1], 0, plan.width)
    of_value, of_logits = _channels(grads[2], 0, plan.width), _channels(grads[0], plan.width, plan.added)
    if (entries := plan.bias) is not None:
        of_bias = sum_by_entry(entries, of_logits, entries.sums.dtype).sum((0, 1)) / plan.scale
        of_bias = of_bias.sum(0) if entries.zeros.dim() == 2 else of_bias
        of_biases = [part[..., 0] for part in split_joined((entries,), [of_bias[..., None]], dtype)]
    if (entries := plan.key) is not None:
        of_entries = sum_by_entry(entries, of_logits, grad.dtype)
        query, table = _channels(operands[0], 0, plan.width), _part(joined, entries.table)
        of_keys = [transposed_product(of_entries, query, table)]
        of_query = product(of_entries, table, by_row(of_query)).view(plan.shape)
    parts = (of_query, of_key, of_value)
    of_contents = (torch.cat(parts, 2),) if number == 1 else parts
    return None, None, *of_contents, *split_joined(plan.vectors, of_keys + of_values, dtype), *of_biases


def _join(plan: Plan, tables: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Join key and value tables, ([heads,] entries, head_dim), and bias tables, ([heads,] entries, 1), in a dtype.

    A result is None where there is no such table.
    """
    joined = bias = None
    if plan.bias is not None:
        *tables, rows, cols = tables
        bias = torch.cat(used_pieces((plan.bias,), (rows[..., None], cols[..., None])), -2) / plan.scale
        bias = to_finite(bias, dtype)
    if plan.vectors:
        joined = converted(torch.cat(used_pieces(plan.vectors, tables), -2), dtype)
    return joined, bias


def _logits(plan: Plan, content: Tensor, joined: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute the logits of each query for the S rows and columns of the grid, (B, N, heads, S), before the scale."""
    heads, (batch, tokens) = plan.heads, content.shape[:2]
    if bias is not None:
        bias = bias.expand(heads, -1, -1).transpose(-2, -1)
    if (entries := plan.key) is not None:
        # A product per head needs no copy of the queries, which in memory are a part of the packed projection, so
        # multiply head by head.
        queries, table = by_head(content, heads), joined.as_strided(*entries.factor)
        by_entry = torch.bmm(queries, table) if bias is None else torch.baddbmm(bias, queries, table)
        return by_entry.as_strided(*entries.by_token).gather(-1, entries.index)
    if bias is not None:
        by_entry = bias.transpose(0, 1).expand(1, tokens, -1, -1)
        return by_entry.gather(-1, plan.bias.index[:1]).expand(batch, -1, -1, -1)
    return plan.no_logits


def _operands(plan: Plan, contents: tuple[Tensor, ...], logits: Tensor, apart: bool) -> Sequence[Tensor]:
    """Append logits to queries, and rows and columns to keys and values: (B, heads, N, width) each.

    With `apart`, augmented queries get a separate block of memory, because backward multiplies them as one matrix, or
    because forward would copy large tensors twice (`Plan.apart`).
    """
    (alone,), (first, second), triple = plan.operands
    if len(contents) == 3:
        added = (logits, plan.hot, plan.hot)
        return [torch.cat(both, -1).as_strided(*alone) for both in zip(contents, added, strict=True)]
    if not apart:
        block = torch.cat((contents[0], torch.cat((logits, plan.both_hot), 2)), -1)
        return [block.as_strided(*part) for part in triple]
    query, both = contents[0].split_with_sizes((plan.heads, 2 * plan.heads), 2)
    query, both = torch.cat((query, logits), -1), torch.cat((both, plan.both_hot), -1)
    return query.as_strided(*alone), both.as_strided(*first), both.as_strided(*second)


def _part(saved: Tensor, part: View) -> Tensor:
    """Cut a part out of a saved tensor, which a user's saved-tensor hook may return as a view of a larger buffer."""
    return saved.as_strided(part.size, part.stride, saved.storage_offset() + part.first)


def _channels(augmented: Tensor, first: int, number: int) -> Tensor:
    """View some channels of augmented vectors (B, heads, N, ...) as (B, N, heads, number)."""
    (batch, heads, tokens, _), (of_batch, of_head, of_token, of_number) = augmented.shape, augmented.stride()
    size, stride = (batch, tokens, heads, number), (of_batch, of_token, of_head, of_number)
    return augmented.as_strided(size, stride, augmented.storage_offset() + first)
