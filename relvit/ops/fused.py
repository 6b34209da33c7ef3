"""Exact relative attention as one stock fused attention over longer vectors.

With rows and columns apart, q_i . a^K_ij is one of H row logits plus one of W column logits of the query i. So append
those H + W logits to the query and one-hot indicators of row and column to the key: the dot product of the longer
vectors is content plus relative logit. A bias goes into the same channels, divided by the scale. The query term is the
same with the roles exchanged. Append the indicators to the value: the extra output channels are the attention's row and
column marginals, and these times the value tables are the value-side term. Nothing of N x N is formed here;
`scaled_dot_product_attention` computes the rest and its gradients in O(N (H + W)) extra memory. The longer vectors are
not kept for backward, but computed again.

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
from relvit.ops.grid import Grid, key_mask, without_padding
from relvit.ops.longer import axis_logits, lengthen, logits_of_keys, logits_of_queries, shorten
from relvit.ops.recompute import recompute_saved
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
        # The compiler's partitioner would keep the longer vectors, as autograd would without `recompute_saved`.
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
    valid, attending = key_mask(key_grid), None
    if valid is not None:
        position_key = without_padding(position_key, valid)
        if attn_mask is None:
            attending = valid.any(dim=1)[:, None, None, None]
            if is_causal:
                attending = _any_so_far(valid, query.shape[2])[:, None, :, None]
        else:
            key, value = without_padding(key, valid), without_padding(value, valid)
            attn_mask, attending = _mask_padding(attn_mask, valid)
    appended = channels(terms, grid, key_grid, valid if attn_mask is None else None, query, value.shape[-1])
    table = None if terms.value is None else join_tables(terms.value, appended.picks.value.reach, value.dtype)
    query_logits = logits_of_queries(position_query, terms, appended.picks, scale)
    key_logits = logits_of_keys(position_key, terms, appended.picks)
    contents = [query, key, value, query_logits, key_logits]
    longer = lengthen(*contents, appended=appended)
    with recompute_saved(longer, partial(lengthen, appended=appended), contents):
        out = F.scaled_dot_product_attention(
            *longer, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
    # Under autocast stock attention lowers single precision.
    result = shorten(out, value.shape[-1], table, appended).to(query.dtype)
    # Queries without any key have attended to padding: they get zeros, forward and backward.
    return result if attending is None else torch.where(attending, result, 0.0)


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
