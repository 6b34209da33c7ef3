"""Slow references of all operations, straight from the papers' formulas, with the same signatures and no checks."""

from relvit.ops.reference.aft import aft_conv, aft_full, aft_local, aft_simple
from relvit.ops.reference.attention import attention_logits, attention_weights, relative_attention, relative_logits
from relvit.ops.reference.lsh import lsh_attention

__all__ = [
    "aft_conv",
    "aft_full",
    "aft_local",
    "aft_simple",
    "attention_logits",
    "attention_weights",
    "lsh_attention",
    "relative_attention",
    "relative_logits",
]
