"""Compute attention weights, N x N, for hooks and attention maps, from recorded q, k and terms of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from relvit.ops.attention import attend
from relvit.ops.inputs import AttentionInputs
from relvit.ops.tracing import without_autocast

# `_RECORD` maps each layer's module `attn_drop` to the inputs of the layer's attention; it holds None while
# `record_logit_inputs` is not active. Each thread has its own value of this context variable, while all threads would
# share an attribute of a module.
_RECORD: ContextVar[dict[nn.Module, AttentionInputs] | None] = ContextVar("record", default=None)


@contextmanager
def record_logit_inputs() -> Iterator[dict[nn.Module, AttentionInputs]]:
    """Record the inputs of attention of each layer that runs uncompiled, by the layer's `attn_drop`."""
    token = _RECORD.set({})
    try:
        yield _RECORD.get()
    finally:
        _RECORD.reset(token)


@torch.no_grad()
def attention_weights(inputs: AttentionInputs) -> Tensor:
    """Compute the weights by which `relvit.ops.relative_attention` of these inputs adds up values, without gradients.

    Returns:
        (B, heads, Nq, Nk), float32, or float64 for float64 queries. The weights of each query sum to 1, or are zero if
        it may attend to no key.
    """
    query, key = inputs.query, inputs.key
    dtype = torch.promote_types(query.dtype, torch.float32)
    # The values are unit vectors, so their weighted average is the vector of the weights.
    units = torch.eye(key.shape[2], dtype=dtype, device=query.device).expand(*query.shape[:2], -1, -1)
    inputs = inputs._replace(value=units, terms=inputs.terms._replace(value=None), dropout_p=0.0)
    with without_autocast(query.device):
        return attend(inputs.to(dtype))


def wants_weights(attn_drop: nn.Module) -> bool:
    """Return whether `show_weights` does anything for a layer's `attn_drop`."""
    if torch.compiler.is_compiling():
        return False
    return _RECORD.get() is not None or bool(attn_drop._forward_hooks or attn_drop._forward_pre_hooks)


def show_weights(attn_drop: nn.Module, inputs: AttentionInputs) -> None:
    """Call a layer's `attn_drop` with the attention weights if the module has hooks, as timm's unfused attention does.

    Through such hooks `timm.utils.AttentionExtract(method='hook')` gets attention maps. The function also records the
    inputs inside of `record_logit_inputs`, and does nothing in compiled graphs.
    """
    if not wants_weights(attn_drop):
        return
    if (record := _RECORD.get()) is not None:
        record[attn_drop] = inputs
    if attn_drop._forward_hooks or attn_drop._forward_pre_hooks:
        attn_drop(attention_weights(inputs))
