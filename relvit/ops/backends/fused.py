"""Relative attention by one stock fused attention over augmented q, k, v; what compiled graphs keep for backward.

With one table per axis, the relative logit of a query and a key is a sum: one of the query's H logits, for the key's
row, plus one of the query's W logits, for the key's column. So append these H + W logits to the query, and one-hot
indicators of row and column to the key: the dot product of the augmented vectors is content plus relative logit. A bias
goes into the same channels, divided by the scale, because stock attention multiplies all logits by the scale. For the
query term, queries and keys exchange roles. Row and column logits that the terms already hold (`AxisLogits`) are
appended unchanged.

For the value term, append the indicators to the value. The additional output channels are then the attention's
marginals, the sums of a query's weights over each row and each column of keys. These sums times the value tables are
the value term.

No N x N tensor is formed here, except for a joint bias (see `pair_bias`): the fused kernels of
`scaled_dot_product_attention` compute the attention and its gradients in O(N (H + W)) extra memory. The augmented
vectors are not kept for backward, but recomputed.

Earlier work also appends such channels: SAM 3's `concat_rel_pos` for the key term, FlashBias (arXiv 2505.12044) for
low-rank biases, and FlashIPA for values.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from relvit.ops.backends.axis_logits import (
    WIDTH_MULTIPLE,
    Axes,
    axis_indices,
    grid_axes,
    joined_ahead,
    joined_with_index,
    key_logits,
    plus_times_table,
    query_axes,
    query_logits,
    with_columns,
)
from relvit.ops.backends.fusing import computed_together, padded_cat, scatter_sum, split_in_two
from relvit.ops.backends.pair_bias import bias_in_mask
from relvit.ops.grid import Grid, key_mask, once_per_raster, rows_and_columns, without_padding
from relvit.ops.inputs import AttentionInputs, added_width
from relvit.ops.recompute import recompute_saved
from relvit.ops.terms import AxisTables, RelativeTerms
from relvit.ops.tracing import is_compiling, trains_in_graph


def relative_attention(inputs: AttentionInputs) -> Tensor:
    """Compute attention with relative terms through augmented vectors; see `relvit.ops.relative_attention`."""
    if is_compiling():
        # Tables are joined outside of the checkpoint, so that backward does not join them once more.
        inputs = inputs._replace(terms=joined_ahead(inputs.terms, inputs.query.dtype))
    if trains_in_graph():
        # Use a checkpoint: otherwise the compiler's partitioner would keep the augmented vectors for backward.
        contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
        return checkpoint(_attend, inputs, use_reentrant=False, context_fn=contexts)
    return _attend(inputs)


# PyTorch would log this message for each compiled graph, because `relative_attention` gives `checkpoint` a
# `context_fn`.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
)


def _keep_attention(_context: object, operator: object, *_args: object, **_options: object) -> CheckpointPolicy:
    """Keep only the results of products in `_attend`: the attention and the logits."""
    keep = "attention" in str(operator) or operator is torch.ops.aten.bmm.default
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _attend(inputs: AttentionInputs) -> Tensor:
    inputs = bias_in_mask(inputs)
    query, key, value, terms, grid, key_grid, mask, *_ = inputs
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
    key_term, value_term = _has_query_logits(terms), terms.value is not None
    width = augmented_width(inputs, padded=valid is not None)
    # Extra columns of the grid, without tokens, fill the width up to a multiple of `WIDTH_MULTIPLE`. `F.pad` would need
    # a separate case for a width that needs no padding, but one graph has to work for all sizes. (`-width %
    # WIDTH_MULTIPLE` would be wrong in ExecuTorch, where remainders of negative numbers are those of C.)
    missing = (WIDTH_MULTIPLE - width % WIDTH_MULTIPLE) % WIDTH_MULTIPLE
    key_axes, axes_of_queries = with_columns(grid_axes(key_grid), missing), query_axes(inputs)
    if not key_term:
        axes_of_queries = with_columns(axes_of_queries, missing)
    like = (query.dtype, query.device)
    augment = partial(
        _augment,
        width=width + missing,
        key_hot=one_hot(key_grid, key_axes, *like) if key_term or value_term else None,
        query_hot=one_hot(grid, axes_of_queries, *like) if terms.query is not None else None,
        valid=valid,
        value_term=value_term,
    )
    contents = [query, key, value, query_logits(inputs, key_axes), key_logits(inputs, axes_of_queries)]
    augmented = augment(*contents)
    with recompute_saved(augmented, augment, contents):
        out = F.scaled_dot_product_attention(
            *augmented,
            attn_mask=mask,
            dropout_p=inputs.dropout_p,
            # `torch.onnx.export(dynamo=False)` passes the model's default `is_causal=False` as a tensor, so convert it.
            is_causal=bool(inputs.is_causal),
            # Give the scale, because PyTorch's default scale would depend on the augmented width.
            scale=inputs.scale,
        )
    if value_term:
        table, index = joined_with_index(terms.value, terms.bucketing, grid, key_axes, value)
        result = _split_output(out, value.shape[-1], table, index)
    else:
        # Slice the output with tokens before heads, as `_split_output` does, so that the gradient always has the
        # output's layout in memory. PyTorch caches cuDNN's backward by the shapes and strides of q, k and v only, and
        # would misread a later gradient that has another layout.
        result = out.transpose(1, 2)[..., : value.shape[-1]].transpose(1, 2)
    # Under autocast stock attention returns half precision, even for float32 inputs, so convert the result back.
    result = result.to(query.dtype)
    # If a query may attend to no key, stock attention has averaged the values of keys that the query must not attend
    # to. Replace this result by zeros, which also stops its gradient.
    return result if attending is None else torch.where(attending, result, 0.0)


def augmented_width(inputs: AttentionInputs, padded: bool) -> int:
    """Return the width of augmented q, k and v before rounding up; `padded`: one channel is for hiding padding."""
    terms, key_axes = inputs.terms, inputs.key_grid.height + inputs.key_grid.width
    query_width = inputs.query.shape[-1] + int(padded) + added_width(terms, inputs.query.dtype)
    value_width = inputs.value.shape[-1]
    if _has_query_logits(terms):
        query_width += key_axes
    if terms.query is not None:
        query_width += sum(axis.size for axis in query_axes(inputs))
    if terms.value is not None:
        value_width += key_axes
    # On the CPU, if value and query had different widths, PyTorch would take a kernel that keeps N x N weights, so make
    # both equally wide.
    return max(query_width, value_width)


def _has_query_logits(terms: RelativeTerms) -> bool:
    """Return whether queries have logits per row and column of the keys; a joint bias is a mask."""
    return isinstance(terms.bias, AxisTables) or any(term is not None for term in (terms.key, terms.axis_logits))


@once_per_raster
def one_hot(grid: Grid, axes: Axes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Encode the row, then the column of each token one-hot, zero for prefix tokens: (1 or B, 1, N, H + W)."""
    rows, cols = axis_indices(axes, device)
    y, x = rows_and_columns(grid, device)
    if grid.coords is not None:
        # A token beyond the outermost row or column counts as a token of this row or column, so move it there.
        y = torch.minimum(torch.maximum(y, rows[:1]), rows[-1:])
        x = torch.minimum(torch.maximum(x, cols[:1]), cols[-1:])
    # Compare instead of calling `F.one_hot`, which would break export with symbolic sizes.
    hot = padded_cat([equal.to(dtype) for equal in (y == rows, x == cols)], -1)
    return F.pad(hot, (0, 0, grid.prefix, 0))[:, None]


def _augment(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_logits: Tensor | None,
    key_logits: Tensor | None,
    *,
    width: int,
    key_hot: Tensor | None,
    query_hot: Tensor | None,
    valid: Tensor | None,
    value_term: bool,
) -> list[Tensor]:
    """Append logits and indicators to queries, keys and values: (B, heads, N, width) each.

    With `valid`, (1 or B, Nk), one more channel adds 0 to the logits of real keys, and a very low number to the logits
    of padding, for which softmax then gives zero.
    """
    if valid is not None:
        key, value = without_padding(key, valid), without_padding(value, valid)
    queries, keys, values = [query], [key], [value]
    if query_logits is not None:
        queries.append(query_logits)
        keys.append(key_hot)
    if key_logits is not None:
        queries.append(query_hot)
        keys.append(key_logits)
    if valid is not None:
        # In the channel that hides padding, the product of query and key is finite, but far below all logits: -1e30
        # (-3.6e9 in float16, whose products are computed in float32).
        size = 6e4 if query.dtype == torch.float16 else 1e15
        queries.append(query.new_full((), size).expand(*query.shape[:-1], 1))
        keys.append(torch.where(valid[:, None, :, None], 0.0, -size).to(key.dtype))
    if value_term:
        values.append(key_hot)
    augmented = [_join(parts, width) for parts in (queries, keys, values)]
    return computed_together(augmented) if len(queries) + len(values) > 2 else augmented


def _join(parts: list[Tensor], width: int) -> Tensor:
    """Concatenate channels after broadcasting the leading dimensions to the first part's, zeros up to `width`."""
    lead = parts[0].shape[:-1]
    missing = width - sum(part.shape[-1] for part in parts)
    if len(parts) == 1 and missing == 0:
        return parts[0]
    if missing:
        parts = [*parts, parts[0].new_zeros(1).expand(*lead, missing)]
    # Lay out the tokens before the heads in memory, as the projections do. The attention then writes its output in this
    # order too, and the output projection reads it without a copy.
    return padded_cat([part.expand(*lead, -1).transpose(1, 2) for part in parts], -1).transpose(1, 2)


def _split_output(out: Tensor, content: int, table: Tensor, index: Tensor) -> Tensor:
    """Split the output into `content` channels and the attention per row and column, and add the value term."""
    # In memory the attention's output has tokens before heads. Keep this order, because the output projection then
    # reads the result without a copy.
    out, size = out.transpose(1, 2), index.shape[-1]
    mixed, marginals = split_in_two(out, content, size)
    # Add up the marginals of an entry in float32 at least, so that the sum is rounded only once.
    marginals = marginals.to(torch.promote_types(out.dtype, torch.float32))
    index = index.transpose(1, 2).expand_as(marginals)
    by_entry = scatter_sum(marginals, index, table.shape[-2])
    return plus_times_table(mixed, by_entry, table).transpose(1, 2)


def _any_so_far(valid: Tensor, queries: int) -> Tensor:
    """Return whether each query may attend to any key that does not come later: (1 or B, Nq) from (1 or B, Nk)."""
    so_far = valid.cumsum(dim=1) > 0
    more = max(0, queries - valid.shape[1])
    return torch.cat((so_far[:, :queries], so_far[:, -1:].expand(-1, more)), dim=1)


def _mask_padding(mask: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Hide padding in a mask; return it, and which queries attend to anything, (B or 1, heads or 1, Nq or 1, 1).

    A user's mask may hold numbers as low as the logit by which `_augment` hides padding, so padding gets -inf in the
    mask. In the new mask, queries that may attend to no key attend to all keys, because some kernels would divide zero
    by zero; `_attend` sets their result to zero.
    """
    mask, valid = mask[(None,) * (4 - mask.dim())], valid[:, None, None, :]
    if mask.dtype == torch.bool:
        allowed = mask & valid
        attending = allowed.any(dim=-1, keepdim=True)
        return allowed | ~attending, attending
    mask = mask.masked_fill(~valid, -torch.inf)
    attending = ~torch.isneginf(mask).all(dim=-1, keepdim=True)
    return mask.masked_fill(~attending, 0.0), attending
