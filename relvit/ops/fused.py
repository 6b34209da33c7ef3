"""Exact relative attention as one stock fused attention over longer vectors.

With rows and columns apart, q_i . a^K_ij is one of H row logits plus one of W column logits of the query i. So append
those H + W logits to the query and one-hot indicators of row and column to the key: the dot product of the longer
vectors is content plus relative logit. A bias goes into the same channels, divided by the scale. The query term is the
same with the roles exchanged. Append the indicators to the value: the extra output channels are the attention's row and
column marginals, and these times the value tables are the value-side term. Nothing of N x N is formed here;
`scaled_dot_product_attention` computes the rest and its gradients in O(N (H + W)) extra memory. The longer vectors are
not kept for backward, but lengthened again.

Prior art for the parts: SAM 3's `concat_rel_pos` (key side), FlashBias (low-rank biases, arXiv 2505.12044), FlashIPA
(value-side concatenation).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from relvit.ops.channels import all_places, channels, distances_of, join_tables, pick_entries
from relvit.ops.grid import Grid
from relvit.ops.longer import axis_logits, lengthen, logits_of_keys, logits_of_queries, shorten
from relvit.ops.rebuilt import Rebuilt
from relvit.ops.terms import RelativeTerms


def relative_logits(
    query: Tensor, terms: RelativeTerms, grid: Grid, key_grid: Grid | None = None
) -> tuple[Tensor, Tensor]:
    """Row and column logits of every query; see `relvit.ops.relative_logits`."""
    key_grid = grid if key_grid is None else key_grid
    pick = pick_entries(distances_of(terms.key), terms.bucketing, grid, all_places(key_grid), query.device)
    logits = axis_logits(query, terms.key, pick)
    return logits[..., : key_grid.height], logits[..., key_grid.height :]


def relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: RelativeTerms,
    grid: Grid,
    key_grid: Grid | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    position_query: Tensor | None = None,
    position_key: Tensor | None = None,
) -> Tensor:
    """Attention with relative terms through longer vectors; see `relvit.ops.relative_attention`."""
    key_grid = grid if key_grid is None else key_grid
    attend = partial(
        _attend,
        terms=terms,
        grid=grid,
        key_grid=key_grid,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        # The default scale would count the appended channels.
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
    )
    contents = [
        query,
        key,
        value,
        query if position_query is None else position_query,
        key if position_key is None else position_key,
    ]
    if torch.is_grad_enabled() and torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        # The compiler's partitioner would keep the longer vectors, as autograd does where `Rebuilt` is not at work.
        contexts = partial(create_selective_checkpoint_contexts, _keep_attention)
        return checkpoint(attend, *contents, use_reentrant=False, context_fn=contexts)
    return attend(*contents)


def _keep_attention(_context: object, operator: object, *_args: object, **_options: object) -> CheckpointPolicy:
    """Of all that is computed in `_attend` only the products are kept: the attention and the logits."""
    kept = "attention" in str(operator) or operator is torch.ops.aten.bmm.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_query: Tensor,
    position_key: Tensor,
    *,
    terms: RelativeTerms,
    grid: Grid,
    key_grid: Grid,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    appended = channels(terms, grid, key_grid, query, value.shape[-1])
    table = None if terms.value is None else join_tables(terms.value, appended.picks.value.reach, value.dtype)
    with Rebuilt() as rebuilt:
        query_logits = logits_of_queries(position_query, terms, appended.picks, scale, rebuilt)
        key_logits = logits_of_keys(position_key, terms, appended.picks, rebuilt)
        contents = [query, key, value, query_logits, key_logits]
        longer = lengthen(*contents, appended)
        kept = [None if tensor is None else tensor.detach() for tensor in contents]
        rebuilt.all_of(longer, partial(lengthen, *kept, appended), kept)
        out = F.scaled_dot_product_attention(
            *longer, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
    # Under autocast stock attention lowers single precision.
    return shorten(out, value.shape[-1], table, appended).to(query.dtype)
