"""Attention weights of a layer, N x N, for hooks and attention maps: fused attention never forms them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from relvit.ops.attention import attend
from relvit.ops.inputs import AttentionInputs
from relvit.ops.tracing import without_autocast

# Where a thread records them, by the `attn_drop` of the layer: no state of a module.
_RECORD: ContextVar[dict[nn.Module, AttentionInputs] | None] = ContextVar("record", default=None)


@contextmanager
def record_logit_inputs() -> Iterator[dict[nn.Module, AttentionInputs]]:
    """Record, by the `attn_drop` of each layer that runs uncompiled, what its logits are computed from."""
    token = _RECORD.set({})
    try:
        yield _RECORD.get()
    finally:
        _RECORD.reset(token)


@torch.no_grad()
def attention_weights(inputs: AttentionInputs) -> Tensor:
    """Compute the weights by which `relvit.ops.relative_attention` adds up values, without gradients.

    Args:
        inputs: the arguments of the operation; the values are not looked at.

    Returns:
        (B, heads, Nq, Nk), float32, or float64 for such queries; rows are queries and sum to 1.
    """
    query, key = inputs.query, inputs.key
    dtype = torch.promote_types(query.dtype, torch.float32)
    # The weighted average of unit vectors is the weights.
    units = torch.eye(key.shape[2], dtype=dtype, device=query.device).expand(*query.shape[:2], -1, -1)
    inputs = inputs._replace(value=units, terms=inputs.terms._replace(value=None), dropout_p=0.0)
    with without_autocast(query.device):
        return attend(inputs.to(dtype))


def show_weights(attn_drop: nn.Module, inputs: AttentionInputs) -> None:
    """Call a layer's `attn_drop` with its weights, as timm's attention does where it is not fused, for hooks there.

    Hooks on that module are how `timm.utils.AttentionExtract(method='hook')` gets attention maps. Without hooks, and in
    compiled graphs, nothing is computed. `record_logit_inputs` gets the arguments themselves.
    """
    if torch.compiler.is_compiling():
        return
    if (record := _RECORD.get()) is not None:
        record[attn_drop] = inputs
    if attn_drop._forward_hooks or attn_drop._forward_pre_hooks:
        attn_drop(attention_weights(inputs))
