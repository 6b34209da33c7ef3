"""Slow reference of LSH attention: the sets of tokens that attend to each other, then softmax over each of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from relvit.ops.grid import Grid, key_mask, without_padding
from relvit.ops.reference.attention import pair_bias
from relvit.ops.terms import RelativeTerms


def lsh_attention(
    query_key: Tensor,
    value: Tensor,
    grid: Grid,
    rotations: Tensor,
    *,
    chunk_size: int | None = None,
    terms: RelativeTerms | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Compute LSH attention from its definition; see `operation.lsh_attention`.

    Source: Kitaev et al. 2020 (arXiv 2001.04451), section 2: eq. 3, with sets P_i that are the unions of the sets of
    eq. 4 over all rounds.
    """
    batch, heads, tokens, _ = query_key.shape
    buckets = max(1, 2 * rotations.shape[2])
    size = min(tokens, chunk_size or 2 * -(-tokens // buckets))
    valid = key_mask(grid)
    valid = torch.ones(1, tokens, dtype=torch.bool, device=value.device) if valid is None else valid
    query_key, value = without_padding(query_key, valid), without_padding(value, valid)

    together = torch.zeros(batch, heads, tokens, tokens, dtype=torch.bool, device=value.device)
    for rotation in rotations:
        hashes = torch.zeros(batch, heads, tokens, dtype=torch.int64, device=value.device)
        if rotation.shape[1]:
            rotated = query_key @ rotation.to(query_key.dtype)
            hashes = torch.cat((rotated, -rotated), dim=-1).argmax(dim=-1)
        # The number of tokens before a token in the sorted sequence, without padding, determines the token's chunk, so
        # count these tokens.
        earlier = torch.ones(tokens, tokens, dtype=torch.bool, device=value.device).tril(-1)
        before = (hashes[..., None, :] < hashes[..., None]) | ((hashes[..., None, :] == hashes[..., None]) & earlier)
        chunk = (before & valid[:, None, None, :]).sum(dim=-1) // size
        back = chunk[..., :, None] - chunk[..., None, :]
        together |= (hashes[..., :, None] == hashes[..., None, :]) & (back >= 0) & (back <= 1)
    together &= valid[:, None, None, :] & valid[:, None, :, None]
    if is_causal:
        together &= torch.ones(tokens, tokens, dtype=torch.bool, device=value.device).tril()

    logits = scale * query_key @ F.normalize(query_key, dim=-1).transpose(-1, -2)
    if terms is not None and terms.bias is not None:
        logits = logits + pair_bias(terms, grid, grid, query_key)
    itself = torch.eye(tokens, dtype=torch.bool, device=value.device)
    others = together & ~itself
    # A token attends to itself only if it can attend to no other token.
    together = torch.where(others.any(dim=-1, keepdim=True), others, together & itself)
    weights = logits.masked_fill(~together, -torch.inf).softmax(dim=-1)
    weights = weights.masked_fill(~valid[:, None, :, None], 0.0)
    return F.dropout(weights, dropout_p) @ value
