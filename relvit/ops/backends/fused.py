"""Relative attention on GPUs and in compiled graphs: one stock fused attention over augmented q, k and v.

With rows and columns apart, q_i . a^K_ij is one of H row logits plus one of W column logits of the query i. So append
those H + W logits to the query and one-hot indicators of row and column to the key: the dot product of the augmented
vectors is content plus relative logit. A bias goes into the same channels, divided by the scale. The query term is the
same with the roles exchanged. Append the indicators to the value: the extra output channels are the attention's row and
column marginals, and these times the value tables are the value-side term. Nothing of N x N is formed here;
`scaled_dot_product_attention` computes the rest and its gradients in O(N (H + W)) extra memory. The augmented vectors
are not kept for backward, but recomputed.

Prior art for the parts: SAM 3's `concat_rel_pos` (key side), FlashBias (low-rank biases, arXiv 2505.12044), FlashIPA
(value-side concatenation).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from relvit.ops.backends.axis_logits import (
    WIDTH_MULTIPLE,
    Axes,
    TableIndex,
    axis_indices,
    grid_axes,
    join_tables,
    key_logits,
    once_per_raster,
    query_axes,
    query_logits,
    sum_by_entry,
    table_index,
    times_table,
)
from relvit.ops.grid import Grid, batched_coords, key_mask, without_padding
from relvit.ops.inputs import AttentionInputs, added_width
from relvit.ops.recompute import recompute_saved
from relvit.ops.tracing import is_exporting, without_autocast


class Layout(NamedTuple):
    """Layout of the parts that are appended to queries, keys and values, as far as grids decide it.

    Attributes:
        width: of the augmented vectors.
        key_axes: rows and columns that have a channel for the key, value and bias terms.
        query_axes: those for the query term.
        key_hot: (1 or B, 1, Nk, H + W), one-hot row and column of each key; None where no term needs it.
        query_hot: (1 or B, 1, Nq, H' + W'), the same of each query, for the query term.
    """

    width: int
    key_axes: Axes
    query_axes: Axes
    key_hot: Tensor | None
    query_hot: Tensor | None


def relative_attention(inputs: AttentionInputs) -> Tensor:
    """Compute attention with relative terms through augmented vectors; see `relvit.ops.relative_attention`."""
    if torch.is_grad_enabled() and torch.compiler.is_compiling() and not is_exporting():
        # The compiler's partitioner would keep the augmented vectors, as autograd would without `recompute_saved`.
        contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
        return checkpoint(_attend, inputs, use_reentrant=False, context_fn=contexts)
    return _attend(inputs)


def _is_of_others(record: logging.LogRecord) -> bool:
    """Return whether a message is not the one that PyTorch logs wherever a compiled checkpoint chooses what to keep."""
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


# It is of no use to whoever compiles a model: `_keep_attention` is what it asks for.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_of_others)


def _keep_attention(_context: object, operator: object, *_args: object, **_options: object) -> CheckpointPolicy:
    """Keep only the products of all that `_attend` computes: the attention and the logits."""
    keep = "attention" in str(operator) or operator is torch.ops.aten.bmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _attend(inputs: AttentionInputs) -> Tensor:
    query, key, value, terms, grid, key_grid, mask = inputs[:7]
    valid, attending = key_mask(key_grid), None
    if valid is not None:
        inputs = inputs._replace(position_key=without_padding(inputs.position_key, valid))
        if mask is None:
            attending = valid.any(dim=1)[:, None, None, None]
            if inputs.is_causal:
                attending = _any_so_far(valid, query.shape[2])[:, None, :, None]
        else:
            key, value = without_padding(key, valid), without_padding(value, valid)
            (mask, attending), valid = _mask_padding(mask, valid), None
    layout = _layout(inputs, padded=valid is not None)
    contents = [query, key, value, query_logits(inputs, layout.key_axes), key_logits(inputs, layout.query_axes)]
    augment = partial(_augment, layout=layout, valid=valid, value_term=terms.value is not None)
    augmented = augment(*contents)
    with recompute_saved(augmented, augment, contents):
        out = F.scaled_dot_product_attention(
            *augmented,
            attn_mask=mask,
            dropout_p=inputs.dropout_p,
            is_causal=inputs.is_causal,
            # The default scale would count the appended channels.
            scale=inputs.scale,
        )
    if terms.value is None:
        result = out[..., : value.shape[-1]]
    else:
        entries = table_index(terms.value, terms.bucketing, grid, layout.key_axes, query)
        table = join_tables(terms.value, entries.reach, value.dtype)
        result = _split_output(out, value.shape[-1], table, entries)
    # Under autocast stock attention lowers single precision.
    result = result.to(query.dtype)
    # Queries without any key have attended to padding: they get zeros, forward and backward.
    return result if attending is None else torch.where(attending, result, 0.0)


def augmented_width(inputs: AttentionInputs, padded: bool) -> int:
    """Width of augmented q, k and v before rounding up; `padded`: one channel is for hiding padding."""
    terms, key_grid = inputs.terms, inputs.key_grid
    query_width, value_width = inputs.query.shape[-1] + int(padded), inputs.value.shape[-1]
    query_width += added_width(terms, inputs.query.dtype)
    if terms.key is not None or terms.bias is not None:
        query_width += key_grid.height + key_grid.width
    if terms.query is not None:
        query_width += sum(axis.size for axis in query_axes(inputs))
    if terms.value is not None:
        value_width += key_grid.height + key_grid.width
    # One width: where value and query differ, PyTorch's CPU kernel falls back to keeping N x N.
    return max(query_width, value_width)


def _layout(inputs: AttentionInputs, padded: bool) -> Layout:
    terms, grid, key_grid = inputs.terms, inputs.grid, inputs.key_grid
    width = augmented_width(inputs, padded)
    # Up to the multiple there are further columns, in which no token is. Unlike zeros that may be none, they make no
    # case of their own, so that one graph serves all sizes.
    missing = -width % WIDTH_MULTIPLE
    key_term = terms.key is not None or terms.bias is not None
    key_axes, axes_of_queries = _with_columns(grid_axes(key_grid), missing), query_axes(inputs)
    if not key_term:
        axes_of_queries = _with_columns(axes_of_queries, missing)
    hot = partial(once_per_raster, _one_hot, like=inputs.query)
    return Layout(
        width + missing,
        key_axes,
        axes_of_queries,
        hot(key_grid, key_axes, inputs.query.dtype) if key_term or terms.value is not None else None,
        hot(grid, axes_of_queries, inputs.query.dtype) if terms.query is not None else None,
    )


def _with_columns(axes: Axes, number: int) -> Axes:
    rows, cols = axes
    return rows, cols._replace(size=cols.size + number)


def _one_hot(grid: Grid, axes: Axes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One-hot row, then one-hot column of each token, zero for prefix tokens: (1 or B, 1, N, H + W).

    Tokens beyond the outermost row or column count as in it. By comparison instead of `one_hot`, which breaks export
    with symbolic sizes.
    """
    rows, cols = axis_indices(axes, device)
    y, x = batched_coords(grid, device).split(1, dim=-1)
    if grid.coords is not None:
        y = torch.minimum(torch.maximum(y, rows[:1]), rows[-1:])
        x = torch.minimum(torch.maximum(x, cols[:1]), cols[-1:])
    hot = torch.cat((y == rows, x == cols), dim=-1).to(dtype)
    return F.pad(hot, (0, 0, grid.prefix, 0))[:, None]


def _augment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_logits: Tensor | None,
    key_logits: Tensor | None,
    *,
    layout: Layout,
    valid: Tensor | None,
    value_term: bool,
) -> list[Tensor]:
    """Append logits and indicators to queries, keys and values: (B, heads, N, width) each.

    With `valid`, (1 or B, Nk), one more channel has a product of 0 for real keys and for padding a logit that softmax
    turns into zero.
    """
    if valid is not None:
        key, value = without_padding(key, valid), without_padding(value, valid)
    queries, keys, values = [query], [key], [value]
    if query_logits is not None:
        queries.append(query_logits)
        keys.append(layout.key_hot)
    if key_logits is not None:
        queries.append(layout.query_hot)
        keys.append(key_logits)
    if valid is not None:
        # The product, -1e30, is far below all logits and finite; half precision, multiplied in single, reaches -3.6e9.
        size = 6e4 if query.dtype == torch.float16 else 1e15
        queries.append(query.new_full((), size).expand(*query.shape[:-1], 1))
        keys.append(torch.where(valid[:, None, :, None], 0.0, -size).to(key.dtype))
    if value_term:
        values.append(layout.key_hot)
    return [_join(parts, layout.width) for parts in (queries, keys, values)]


def _join(parts: list[Tensor], width: int) -> Tensor:
    """Concatenate channels after broadcasting the leading dimensions to the first part's, zeros up to `width`.

    In memory tokens come before heads, as the projections have it: so the attention writes its output as well.
    """
    lead = parts[0].shape[:-1]
    missing = width - sum(part.shape[-1] for part in parts)
    if missing:
        parts = [*parts, parts[0].new_zeros(()).expand(*lead, missing)]
    return torch.cat([part.expand(*lead, -1).transpose(1, 2) for part in parts], dim=-1).transpose(1, 2)


def _split_output(out: Tensor, content: int, table: Tensor, entries: TableIndex) -> Tensor:
    """Split the output into `content` channels and the attention per row and column, and add the value term."""
    # Tokens before heads: so the attention writes its output, and so the projection wants it.
    size = entries.index.shape[-1]
    parts = out.transpose(1, 2).split((content, size, out.shape[-1] - content - size), dim=-1)
    # Half precision is left for sums over several marginals, and rounded to once, as by stock attention.
    precision = torch.promote_types(out.dtype, torch.float32)
    on_entries = sum_by_entry(parts[1].to(precision), entries.index, table.shape[-2])
    with without_autocast(out.device):
        return (parts[0] + times_table(on_entries, table.to(precision))).to(out.dtype).transpose(1, 2)


def _any_so_far(valid: Tensor, queries: int) -> Tensor:
    """Whether a query may attend to any key that does not come later: (1 or B, Nq) from (1 or B, Nk)."""
    so_far = valid.cumsum(dim=1) > 0
    more = max(0, queries - valid.shape[1])
    return torch.cat((so_far[:, :queries], so_far[:, -1:].expand(-1, more)), dim=1)


def _mask_padding(mask: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """A mask that hides padding too, and which queries then attend to anything, (B or 1, heads or 1, Nq or 1, 1).

    Beside a mask, whose numbers may be as low as those of any channel, only -inf hides padding. Queries that may attend
    to nothing attend to everything: not every kernel knows how to divide by nothing.
    """
    mask, valid = mask[(None,) * (4 - mask.dim())], valid[:, None, None, :]
    if mask.dtype == torch.bool:
        allowed = mask & valid
        attending = allowed.any(dim=-1, keepdim=True)
        return allowed | ~attending, attending
    mask = mask.masked_fill(~valid, -torch.inf)
    attending = ~torch.isneginf(mask).all(dim=-1, keepdim=True)
    return mask.masked_fill(~attending, 0.0), attending
