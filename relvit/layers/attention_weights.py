"""Attention weights of a layer, N x N, for hooks and attention maps: fused attention never forms them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relvit.ops import Grid, RelativeTerms, relative_attention
from relvit.ops.tracing import without_autocast


class LogitInputs(NamedTuple):
    """Inputs of a layer's logits: the arguments of `relvit.ops.relative_attention` but for the values."""

    query: Tensor
    key: Tensor
    terms: RelativeTerms
    grid: Grid
    options: dict[str, Any]


# Where a thread records them, by the `attn_drop` of the layer: no state of a module.
_RECORD: ContextVar[dict[nn.Module, LogitInputs] | None] = ContextVar("record", default=None)


@contextmanager
def record_logit_inputs() -> Iterator[dict[nn.Module, LogitInputs]]:
    """Record, by the `attn_drop` of each layer that runs uncompiled, what its logits are computed from."""
    token = _RECORD.set({})
    try:
        yield _RECORD.get()
    finally:
        _RECORD.reset(token)


@torch.no_grad()
def attention_weights(query: Tensor, key: Tensor, terms: RelativeTerms | None, grid: Grid, **options: Any) -> Tensor:
    """Compute the weights by which `relvit.ops.relative_attention` adds up values, without gradients.

    Args: see `relvit.ops.relative_attention`.

    Returns:
        (B, heads, Nq, Nk), float32, or float64 for such queries; rows are queries and sum to 1.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    query, key = query.to(dtype), key.to(dtype)
    for name in ("position_query", "position_key"):
        if options.get(name) is not None:
            options[name] = options[name].to(dtype)
    terms = RelativeTerms() if terms is None else terms._replace(value=None)
    # The weighted average of unit vectors is the weights.
    count = key.shape[2]
    units = torch.eye(count, dtype=dtype, device=query.device).expand(*query.shape[:2], -1, -1)
    with without_autocast(query.device):
        return relative_attention(query, key, units, terms, grid, **options)


def show_weights(
    attn_drop: nn.Module, query: Tensor, key: Tensor, terms: RelativeTerms | None, grid: Grid, **options: Any
) -> None:
    """Call a layer's `attn_drop` with its weights, as timm's attention does where it is not fused, for hooks there.

    Hooks on that module are how `timm.utils.AttentionExtract(method='hook')` gets attention maps. Without hooks, and in
    compiled graphs, nothing is computed. `record_logit_inputs` gets the arguments themselves.
    """
    if torch.compiler.is_compiling():
        return
    if (record := _RECORD.get()) is not None:
        record[attn_drop] = LogitInputs(query, key, RelativeTerms() if terms is None else terms, grid, options)
    if not (attn_drop._forward_hooks or attn_drop._forward_pre_hooks):
        return
    attn_drop(attention_weights(query, key, terms, grid, **options))
