"""The weights of an attention layer, which fused attention never forms, for whoever wants to look at them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relvit.ops import Grid, RelativeTerms, patch_coords, reference

# Numbers in the relative vectors of all pairs that are computed at a time: 256 MiB in single precision.
MOST = 2**26


@torch.no_grad()
def attention_weights(
    query: Tensor,
    key: Tensor,
    terms: RelativeTerms | None,
    grid: Grid,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    position_query: Tensor | None = None,
    position_key: Tensor | None = None,
) -> Tensor:
    """Compute the weights by which `relvit.ops.relative_attention` adds up values, without gradients.

    From the formula (`relvit.ops.reference`), some queries at a time.

    Args: see `relvit.ops.relative_attention`.

    Returns:
        (B, heads, N, N), float32, or float64 for such queries; rows are queries and sum to 1.
    """
    count, dtype = query.shape[2], torch.promote_types(query.dtype, torch.float32)
    query, key, position_query, position_key = (
        None if part is None else part.to(dtype) for part in (query, key, position_query, position_key)
    )
    if is_causal:
        attn_mask = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
    coords = patch_coords(grid, query.device)
    samples = coords.shape[0] if coords.dim() == 3 else 1
    step = max(1, MOST // (samples * query.shape[1] * count * query.shape[3]))
    parts = []
    for start in range(0, count, step):
        end = min(start + step, count)
        # Of the patches, which come behind the prefix tokens.
        first, last = (max(0, place - grid.prefix) for place in (start, end))
        some = grid._replace(prefix=end - start - (last - first), coords=coords[..., first:last, :], valid=None)
        masked = attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] == count
        with torch.autocast(query.device.type, enabled=False):
            weights = reference.attention_weights(
                query[:, :, start:end],
                key,
                RelativeTerms() if terms is None else terms,
                some,
                grid,
                attn_mask[..., start:end, :] if masked else attn_mask,
                False,
                scale,
                None if position_query is None else position_query[:, :, start:end],
                position_key,
            )
        parts.append(weights)
    return torch.cat(parts, dim=2)


def show_weights(
    attn_drop: nn.Module,
    query: Tensor,
    key: Tensor,
    terms: RelativeTerms | None,
    grid: Grid,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    position_query: Tensor | None = None,
    position_key: Tensor | None = None,
) -> None:
    """Call a layer's `attn_drop` with its weights, as timm's attention does where it is not fused, for hooks there.

    Hooks on that module are how `timm.utils.AttentionExtract(method='hook')` and others get at attention maps. Without
    hooks, and in compiled graphs, nothing is computed.
    """
    if torch.compiler.is_compiling() or not (attn_drop._forward_hooks or attn_drop._forward_pre_hooks):
        return
    options = (attn_mask, is_causal, scale, position_query, position_key)
    attn_drop(attention_weights(query, key, terms, grid, *options))
